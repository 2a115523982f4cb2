"""A finished token directory to the Hugging Face hub: a dataset that `train.json` can name.

Large files go one after the other, and whatever has arrived is not sent again by the same command; one commit at the
end shows all of them at once, so nobody downloads half a dataset.
"""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from errors import BadInput
from tokens.audit import verify
from tokens.dataset_card import dataset_card
from tokens.ledger import LEDGER
from tokens.length_chart import CHART
from tokens.manifest import MANIFEST, is_of, manifest_text, read_manifest
from tokens.remote import REMOTE
from tokens.sources import HUB, STANDARD_LIBRARY
from tokens.splits import SPLITS
from tokens.tokenizer import RANKS_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import DatasetInfo

CARD = "README.md"


def push(directory: Path, repository: str, *, private: bool, license_name: str | None) -> list[str]:
    """Upload a token directory as the dataset OWNER/NAME; return what was done, as lines.

    Raises BadInput where there is nothing to publish, for damaged files, and when the hub cannot be reached or refuses.
    """
    _check_names(repository, license_name)
    if read_manifest(directory) is None:
        raise BadInput(f"{directory / MANIFEST}: missing; only a finished preparation can be published")
    _check_logged_in()
    lines = verify(str(directory))
    values = json.loads((directory / MANIFEST).read_text())
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
        _upload(api, repository, files)
    except BadInput:
        raise
    except Exception as error:  # the hub client raises errors of its own and lets its transport's through
        raise BadInput(f"dataset {repository}: cannot be uploaded: {_detail(error)}") from error
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
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return b"".join(
        json.dumps({**entry, "examples": {}} if "examples" in entry else entry).encode() + b"\n" for entry in entries
    )


def _upload(api: "HfApi", repository: str, files: dict[str, Path | bytes]) -> None:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    for operation in operations:
        # One by one: what has arrived is known to the hub, committed or not, and the same command passes over it.
        api.preupload_lfs_files(repository, [operation], repo_type="dataset", free_memory=False)
    api.create_commit(repository, operations, commit_message="Tokens prepared by Lockstep", repo_type="dataset")


def _check_names(repository: str, license_name: str | None) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository, re.ASCII):
        raise BadInput(f"{repository}: no name of a dataset; wanted OWNER/NAME, as in its address on the hub")
    if license_name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license_name):
        raise BadInput(f"--license: got '{license_name}', wanted an identifier of the hub, as mit, odc-by or cc-by-4.0")


def _check_logged_in() -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise BadInput("no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")


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


def _detail(error: BaseException) -> str:
    while type(error) is RuntimeError and error.__cause__ is not None:  # "Error while uploading"
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    detail = " ".join(said.split())
    if status in (401, 403):
        return f"{detail}; run `hf auth login` with a token that may write to it"
    return f"{detail}; the same command goes on"
