"""Hugging Face hub client: names, login, upload, and explained errors."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadInput, printable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
DETAIL_CHARACTERS = 500  # shown of the hub's message in an error


def check_names(repository: str, license_name: str | None) -> None:
    """Raise BadInput for a repository name or a license that the hub would refuse."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository, re.ASCII):
        raise BadInput(f"{repository}: not a repository name; wanted OWNER/NAME, as in its URL on the hub")
    if license_name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license_name):
        raise BadInput(f"--license: got '{license_name}', wanted a license of the hub, such as mit or cc-by-4.0")


def check_logged_in() -> None:
    """Raise BadInput where there is no access token."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise BadInput("no access token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")


def upload(api: "HfApi", repository: str, files: dict[str, Path | bytes], kind: str, message: str) -> None:
    """Upload files to a "model" or "dataset" (`kind`) in one commit. Raises the errors that `hub_errors` explains."""
    from huggingface_hub import CommitOperationAdd

    quiet()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    for operation in operations:
        # One by one: the hub keeps uploaded files, committed or not, and a rerun skips them.
        api.preupload_lfs_files(repository, [operation], repo_type=kind, free_memory=False)
    api.create_commit(repository, operations, commit_message=message, repo_type=kind)


def download_snapshot(
    repository: str, kind: str, patterns: list[str], problem: str, advice: str = "", **options: Any
) -> Any:
    """Download files of a "model" or "dataset"; return their folder, of a `dry_run` their list. Raises BadInput."""
    from huggingface_hub import snapshot_download

    quiet()
    with hub_errors(f"{repository}: {problem}", "read", advice):
        return snapshot_download(repository, repo_type=kind, allow_patterns=patterns, **options)


def quiet() -> None:
    """Silence warnings about single attempts, not the final error; show progress bars in terminals only."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    for name in ("huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()


@contextmanager
def hub_errors(problem: str, wanted: str = "write to", advice: str = "") -> Iterator[None]:
    """Turn errors of the client and its transport into BadInput; `wanted`: what the access token must allow."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{problem}: {explained(error, wanted)}{advice}") from error


def explained(error: BaseException, wanted: str = "write to") -> str:
    """Return an error of the hub client as one line with advice. `wanted`: what the access token must allow."""
    from huggingface_hub import constants

    while type(error) is RuntimeError and error.__cause__ is not None:  # "Error while uploading"
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    detail = printable(" ".join(said.split()))[:DETAIL_CHARACTERS]
    if status is None and constants.HF_HUB_OFFLINE and not isinstance(error, ValueError):
        return "HF_HUB_OFFLINE is set: unset it to reach the hub"
    if status in (401, 403):
        name = "check the name, or " if wanted == "read" else ""
        return f"{detail}; {name}run `hf auth login` with a token that may {wanted} it"
    if status == 404 or isinstance(error, ValueError):
        return f"{detail}; check the name"
    return f"{detail}; rerun the same command to resume"
