"""A finished token directory to the Hugging Face hub: a dataset that `train.json` can name.

Large files go one after the other, and whatever has arrived is not sent again by the same command; one commit at the
end shows all of them at once, so nobody downloads half a dataset.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common.errors import BadInput
from common.hub_client import CARD, check_logged_in, check_names, explained, upload
from common.json_files import read_json_lines
from tokens.documents.remote import REMOTE
from tokens.documents.sources import HUB, STANDARD_LIBRARY
from tokens.format.manifest import MANIFEST, is_of, manifest_text, read_manifest
from tokens.format.splits import SPLITS
from tokens.hub.dataset_card import dataset_card
from tokens.prepare.commit_log import LEDGER
from tokens.prepare.verify import verify
from tokens.stats.length_chart import CHART
from tokens.tokenizer.tokenizer import RANKS_FILE

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo


def push(directory: Path, repository: str, *, private: bool, license_name: str | None) -> list[str]:
    """Upload a token directory as the dataset OWNER/NAME; return what was done, as lines.

    Raises BadInput where there is nothing to publish, for damaged files, and when the hub cannot be reached or refuses.
    """
    check_names(repository, license_name)
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadInput(f"{directory / MANIFEST}: missing; only a finished preparation can be published")
    check_logged_in()
    lines = verify(str(directory))
    values = manifest.values
    _check_verified(directory, values)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, repo_type="dataset", private=private or None, exist_ok=True)
        there = api.dataset_info(repository, files_metadata=True)
        _check_repository(repository, there, values, private=private)
        files = published_files(directory, values)
        known = {file.rfilename for file in there.siblings or []}
        if CARD in known:  # somebody may have written it
            lines.append(f"{repository}: its {CARD} is kept; delete it on the hub to get a new one")
        else:
            files[CARD] = dataset_card(repository, files, public_manifest(values), license_name).encode()
        upload(api, repository, files, "dataset", "Tokens prepared by Lockstep")
    except BadInput:
        raise
    except Exception as error:  # the hub client raises errors of its own and lets its transport's through
        raise BadInput(f"dataset {repository}: cannot be uploaded: {explained(error)}") from error
    return [*lines, f'{url}: {len(files)} files; "dataset": "{repository}" in train.json trains on them']


def published_files(directory: Path, values: dict[str, Any]) -> dict[str, Path | bytes]:
    """Return what is uploaded, by name: paths of files as they are, or a content of its own.

    Not plan.json: it lists every input with its full path on this machine, and is of use only beside the inputs.
    """
    files: dict[str, Path | bytes] = {name: directory / name for name in values["files"]}
    files[MANIFEST] = manifest_text(public_manifest(values)).encode()
    if (directory / LEDGER).is_file():
        files[LEDGER] = _public_ledger(directory / LEDGER)
    for name in (RANKS_FILE, CHART):
        if (directory / name).is_file():
            files[name] = directory / name
    return files


def public_manifest(values: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest without what is this machine's own: folders of local sources, examples of bad documents."""
    sources = [{**source, "name": public_name(source["name"])} for source in values.get("sources", [])]
    return {**values, "sources": sources, "examples": {}}


def public_name(source: str) -> str:
    """Return a source's name without folders of this machine, and without user, password and signature of a URL."""
    if source == STANDARD_LIBRARY or source.startswith(HUB):
        return source
    if REMOTE in source:
        parts = urlsplit(source)
        return f"{parts.scheme}{REMOTE}{parts.netloc.rpartition('@')[2]}{parts.path}"
    return Path(source).name or "local files"


def _public_ledger(path: Path) -> bytes:
    """Return a ledger without examples of bad documents: they quote paths."""
    lines = read_json_lines(path)
    if lines.unreadable:
        raise BadInput(f"{path}: damaged: {lines.unreadable:,} of its lines are no JSON; prepare these tokens anew")
    return b"".join(
        json.dumps({**entry, "examples": {}} if "examples" in entry else entry).encode() + b"\n"
        for entry in lines.records
    )


def _check_verified(directory: Path, values: dict[str, Any]) -> None:
    """Raise BadInput for a manifest that lists anything but token files beside it: of other names verify reads none."""
    for name in values["files"]:
        if not any(is_of(name, split) for split in SPLITS):
            raise BadInput(f"{directory / MANIFEST}: files: got {name}, wanted token files of {', '.join(SPLITS)}")


def _check_repository(repository: str, there: "DatasetInfo", values: dict[str, Any], *, private: bool) -> None:
    """Raise BadInput rather than show what was to be private, or mix these tokens with others."""
    if private and not there.private:
        raise BadInput(f"{repository}: exists and is public; make it private on the hub, or pass another name")
    for file in there.siblings or []:
        if file.rfilename.endswith(".safetensors"):
            got, wanted = file.lfs.sha256 if file.lfs else "", values["files"].get(file.rfilename, {}).get("sha256")
            if got != wanted:
                raise BadInput(
                    f"{repository}: has another {file.rfilename} than {MANIFEST} lists; pass another name, or delete it"
                )
