"""Talking to the Hugging Face hub."""

import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import BadInput, printable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
DETAIL_CHARACTERS = 500  # of what the hub says


def check_names(repository: str, license_name: str | None) -> None:
    """Raise BadInput for what the hub would refuse as a name or a license."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository, re.ASCII):
        raise BadInput(f"{repository}: no name on the hub; wanted OWNER/NAME, as in its address there")
    if license_name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license_name):
        raise BadInput(f"--license: got '{license_name}', wanted an identifier of the hub, as mit, odc-by or cc-by-4.0")


def check_logged_in() -> None:
    """Raise BadInput where there is no token."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise BadInput("no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")


def upload(api: "HfApi", repository: str, files: dict[str, Path | bytes], kind: str, message: str) -> None:
    """Put files into a repository in one commit. Raises errors of the hub's client, which `explained` explains.

    `kind`: "model" or "dataset".
    """
    from huggingface_hub import CommitOperationAdd

    show_bars_in_terminals_only()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    for operation in operations:
        # One by one: what has arrived is known to the hub, committed or not, and the same command passes over it.
        api.preupload_lfs_files(repository, [operation], repo_type=kind, free_memory=False)
    api.create_commit(repository, operations, commit_message=message, repo_type=kind)


def show_bars_in_terminals_only() -> None:
    """Keep the client's progress bars out of logs."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def quiet() -> None:
    """Keep the client's warnings out of the output: each attempt that failed is one; the error at the end tells."""
    for name in ("huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)


def explained(error: BaseException, wanted: str = "write to") -> str:
    """Return what an error of the hub's client says, in a line, and what to do; `wanted`: what a token must allow."""
    while type(error) is RuntimeError and error.__cause__ is not None:  # "Error while uploading"
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    detail = printable(" ".join(said.split()))[:DETAIL_CHARACTERS]
    if status in (401, 403):
        return f"{detail}; run `hf auth login` with a token that may {wanted} it"
    return f"{detail}; the same command goes on"
