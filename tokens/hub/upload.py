"""Upload a finished token directory and its card to the Hugging Face hub in one commit, ready for `train.json`."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from common.errors import BadInput
from common.hub_client import CARD, HUB, check_logged_in, check_names, hub_errors, upload
from common.json_files import read_every_line
from common.redaction import HIDDEN, redacted_name
from common.remote_files import REMOTE
from tokens.documents.sources import STANDARD_LIBRARY
from tokens.format.manifest import MANIFEST, RANKS_FILE, SPLITS, Manifest, manifest_text, read_manifest, split_of
from tokens.prepare.commit_log import COMMITS
from tokens.prepare.plan import HASH
from tokens.prepare.verify import verify
from tokens.stats.stats import CHART

TEMPLATE = Path(__file__).with_name("dataset_card.md.jinja")  # template of the card, README.md


def push(directory: Path, repository: str, *, private: bool, license_name: str | None) -> list[str]:
    """Upload a token directory as the dataset OWNER/NAME, and return lines to print.

    Raises BadInput if the directory cannot be uploaded, for example because the repository contains other tokens, or
    because it is public despite --private.
    """
    repository = repository.removeprefix(HUB)
    check_names(repository, license_name)
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadInput(f"{directory / MANIFEST}: missing; only a finished preparation can be published")
    check_logged_in()
    for name in manifest.files:  # `verify` reads only token files
        if split_of(name) is None:
            raise BadInput(f"{directory / MANIFEST}: files: got {name}, wanted token files of {', '.join(SPLITS)}")
    lines = verify(str(directory))
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_errors(f"dataset {repository}: cannot be uploaded"):
        url = api.create_repo(repository, repo_type="dataset", private=private or None, exist_ok=True)
        repository_info = api.dataset_info(repository, files_metadata=True)
        if private and not repository_info.private:
            raise BadInput(f"{repository}: exists and is public; make it private on the hub, or pass another name")
        for file in repository_info.siblings or []:
            if file.rfilename.endswith(".safetensors"):
                sha256, entry = file.lfs.sha256 if file.lfs else "", manifest.files.get(file.rfilename)
                if entry is None or sha256 != entry.sha256:
                    raise BadInput(
                        f"{repository}: already contains a different {file.rfilename}; delete it, or pass another name"
                    )
        files = published_files(directory, manifest)
        if CARD in {file.rfilename for file in repository_info.siblings or []}:  # the card may have been edited
            lines.append(f"{repository}: keeps its {CARD}; to get a new card, delete the old one on the hub")
        else:
            files[CARD] = dataset_card(repository, files, public_manifest(manifest), license_name).encode()
        upload(api, repository, files, "dataset", "Tokens prepared by Lockstep")
    return [*lines, f'{url}: {len(files)} files; to train on them, write "dataset": "{repository}" in train.json']


def published_files(directory: Path, manifest: Manifest) -> dict[str, Path | bytes]:
    """Return the path or the content of each file to upload. plan.json is left out because it contains full paths."""
    files: dict[str, Path | bytes] = {name: directory / name for name in manifest.files}
    files[MANIFEST] = manifest_text(public_manifest(manifest)).encode()
    if (directory / COMMITS).is_file():
        entries = read_every_line(directory / COMMITS, advice="prepare these tokens again")
        # Examples of problems quote local paths, so they are not published.
        public = [entry | {"examples": {}} if "examples" in entry else entry for entry in entries]
        files[COMMITS] = b"".join(json.dumps(entry).encode() + b"\n" for entry in public)
    return files | {name: directory / name for name in (RANKS_FILE, CHART) if (directory / name).is_file()}


def public_manifest(manifest: Manifest) -> Manifest:
    """Return a manifest without its private parts: the folders of local sources, and the examples of bad documents."""
    sources = [attrs.evolve(source, name=public_name(source.name)) for source in manifest.sources]
    return attrs.evolve(manifest, sources=sources, examples={})


def public_name(source: str) -> str:
    """Return a source's name without local folders. The secrets, user name and query of a URL are removed as well."""
    if source == STANDARD_LIBRARY or source.startswith(HUB):
        return source
    if REMOTE in source:
        parts = urlsplit(redacted_name(source).replace(f"{HIDDEN}@", ""))
        return f"{parts.scheme}{REMOTE}{parts.netloc.rpartition('@')[2]}{parts.path}"
    return Path(source).name or "local files"


def dataset_card(repository: str, names: Iterable[str], manifest: Manifest, license_name: str | None) -> str:
    """Return the card of a dataset that has the named files."""
    from huggingface_hub import DatasetCard, DatasetCardData

    name, tokenizer, tokens = repository.partition("/")[2], manifest.tokenizer, Counter[str | None]()
    for file, entry in manifest.files.items():
        tokens[split_of(file)] += entry.tokens
    shares = [f"{split} {count / max(1, tokens.total()):.2%}" for split, count in tokens.items() if count]
    data = DatasetCardData(
        license=license_name,
        pretty_name=name,
        task_categories=["text-generation"],
        tags=["lockstep", "tokens", f"tokenizer-{tokenizer.name.removesuffix('.tiktoken')}"],
        viewer=False,  # the hub's viewer shows tables, but not token files
    )
    card = DatasetCard.from_template(
        data,
        str(TEMPLATE),
        name=name,
        repository=repository,
        names=set(names),
        chart=CHART,
        manifest=manifest,
        tokenizer=tokenizer,
        shares=", ".join(shares),
        held_out=_held_out(manifest),
    )
    return str(card).rstrip() + "\n"


def _held_out(manifest: Manifest) -> str:
    rule = manifest.split
    if rule is None or rule.kind != HASH:
        return "the last documents"
    rule_text = f"a hash (xxh3_64, seed {rule.seed}) of their text"
    if rule.from_tail:
        return f"the last documents ({' and '.join(rule.from_tail)})"
    if rule.shortened:
        excess = f"except the last documents of {' and '.join(rule.shortened)}, which were moved to train"
        return (
            f"the documents that were selected by {rule_text}, {excess}; copies of a document may be in several splits"
        )
    return f"the documents that were selected by {rule_text}, so all copies of a document are in the same split"
