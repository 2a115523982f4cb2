"""Client of the Hugging Face hub: names, login, uploads and downloads, and errors explained for users."""

import difflib
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadInput
from common.files import HUB, is_folder
from common.output import note, show
from common.text import QUOTED_CHARACTERS, in_brackets
from common.transports import bounded

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
DATASET = "dataset directory"
MODEL = "model directory"
REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
NAME_PATTERN = r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?"  # name of a model; old models have no owner
OUR_FOLDERS = ("runs/", "token_files/")
OUR_TAG = "lockstep"  # tag in the card of every model that `evaluate.py export` writes
CARD_BYTES = 1 << 14  # how much of a card is read; its metadata is at the beginning
CLOSE = 0.84  # if difflib's similarity of two names is at least this, one may be a misspelling of the other
LONGEST_CHAIN = 20  # maximum number of exceptions in a chain that are searched for the first cause
DETAIL_CHARACTERS = 500  # maximum length of a list of configurations in an error


def hub_name(reference: str, kind: str, folders: Iterable[Path], is_valid: Callable[[Path], bool]) -> str:
    """Return the hub name of a model or dataset that is not a local folder.

    The name is OWNER/NAME; a model may also have a NAME without an owner. A reference that starts with hf: is always a
    name on the hub. Without hf:, a name that is similar to the name of a local folder is refused, and the error
    suggests the folder, so that a misspelling does not start a download.

    Arguments:
        reference: the name as written on the command line or in a file
        kind: DATASET or MODEL
        folders: the folders that contain local datasets or models
        is_valid: returns whether a folder is a dataset or a model

    Raises BadInput for a name that the hub would not accept, and for a name that seems to mean a local folder.
    """
    name, pattern = reference.removeprefix(HUB), REPOSITORY if kind == DATASET else NAME_PATTERN
    if reference.startswith(HUB) and re.fullmatch(pattern, name, re.ASCII):
        return name
    near = nearest_folder(reference, folders, is_valid)
    on_hub = re.fullmatch(pattern, name, re.ASCII) is not None
    is_local = "/" in reference and is_folder(Path(reference).parent)
    if near is None and on_hub and not is_local:
        return name
    suggestion = "" if near is None else f"did you mean {near}? "
    advice = f"for a {kind.rpartition(' ')[0]} on the hub, write {HUB}{name}"
    if not on_hub:
        advice = f"wanted a {kind}, or OWNER/NAME on the hub"
    raise BadInput(f"{reference}: no such directory; {suggestion}{advice}")


@functools.cache
def note_local(reference: str, kind: str, advice: str = "") -> None:
    """Print a note, once, that a local path is read although it could also be the name of a repository on the hub.

    The hub is not asked whether it has a repository of that name, because that would need the network. `advice` states
    how to use the repository instead. No note is printed for names in the folders where our commands put runs and
    tokens, nor for a path that starts with ./, because those are clearly local. Call this only for a folder that may
    have been downloaded. There is no doubt about a folder that this program has created, or that contains a user's own
    texts.
    """
    if re.fullmatch(REPOSITORY, reference, re.ASCII) and not reference.startswith(OUR_FOLDERS):
        noun = kind.rpartition(" ")[0]
        advice = advice or f"write {HUB}{reference}"
        show(note(f"{reference}: using the local path of this name; for a {noun} on the hub, {advice}"), once=True)


def is_own_export(directory: Path) -> bool:
    """Return whether `evaluate.py export` wrote a model directory. The tags in its model card show this."""
    try:
        with (directory / CARD).open("rb") as file:
            head = file.read(CARD_BYTES)
    except OSError:
        return False
    front_matter = head.partition(b"\n---")[0].splitlines()
    return front_matter[:1] == [b"---"] and f"- {OUR_TAG}".encode() in front_matter


def nearest_folder(reference: str, folders: Iterable[Path], is_valid: Callable[[Path], bool]) -> Path | None:
    """Return the valid local folder whose name is most similar to a reference; None if no name is similar.

    The user may mean this folder: the reference may have the wrong path, or may be misspelled.
    """
    expected = Path(reference)
    places = dict.fromkeys([Path(), *folders, expected.parent])
    similarity: dict[Path, float] = {}
    for path in (path for place in places for path in _folders_in(place)):
        pairs = [(path.name, expected.name), *([(str(path), reference)] if "/" in reference else [])]
        # The folders' own names must be similar, too, because all paths in one place share most of their characters.
        similarity[path] = min(
            difflib.SequenceMatcher(None, existing[-QUOTED_CHARACTERS:], text[-QUOTED_CHARACTERS:]).ratio()
            for existing, text in pairs
        )
    close = sorted((path for path in similarity if similarity[path] >= CLOSE), key=lambda path: -similarity[path])
    return next(filter(is_valid, close), None)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if is_folder(path) and not path.name.startswith("."))
    except OSError:
        return []


def check_names(repository: str, license_name: str | None) -> None:
    """Raise BadInput for a repository name or a license that the hub would refuse."""
    if not re.fullmatch(REPOSITORY, repository, re.ASCII):
        raise BadInput(f"{repository}: not a repository name; wanted OWNER/NAME, as in its URL on the hub")
    if license_name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license_name):
        raise BadInput(f"--license: got '{license_name}', wanted a license of the hub, such as mit or cc-by-4.0")


def check_logged_in() -> None:
    """Raise BadInput if there is no access token."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise BadInput("no access token for the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")


def upload(api: "HfApi", repository: str, files: dict[str, Path | bytes], kind: str, message: str) -> None:
    """Upload files to a "model" or "dataset" (`kind`) in one commit. Raises the errors that `hub_errors` explains."""
    from huggingface_hub import CommitOperationAdd

    quiet()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    for operation in operations:
        # Files are uploaded one by one: the hub keeps them even if they are never committed, and a rerun skips them.
        api.preupload_lfs_files(repository, [operation], repo_type=kind, free_memory=False)
    api.create_commit(repository, operations, commit_message=message, repo_type=kind)


def download_snapshot(
    repository: str, kind: str, patterns: list[str], problem: str, advice: str = "", **options: Any
) -> Any:
    """Download files of a "model" or "dataset"; return their folder. Raises BadInput.

    With the option `dry_run`, return the list of files instead.
    """
    from huggingface_hub import snapshot_download

    quiet()
    with hub_errors(f"{repository}: {problem}", "read", advice):
        return snapshot_download(repository, repo_type=kind, allow_patterns=patterns, **options)


def quiet() -> None:
    """Hide the libraries' warnings about single failed attempts. Outside a terminal, hide their progress bars, too."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    for name in ("huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()


@contextmanager
def hub_errors(problem: str, permission: str = "write to", advice: str = "") -> Iterator[None]:
    """Convert errors of the client and its transport to BadInput.

    `permission`, "write to" or "read", is what the access token must allow.
    """
    _bound_requests()
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{problem}: {explained(error, permission, advice)}") from error


@functools.cache
def _bound_requests() -> None:
    """Apply the limits of `common.transports` to the hub's client, which has no timeouts.

    Only the first call has an effect.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    set_client_factory(lambda: bounded(default_client_factory()))


def explained(error: BaseException, permission: str = "write to", advice: str = "") -> str:
    """Return one line that explains an error of the hub client and what to do next, followed by `advice`.

    `permission` is what the access token must allow. The message of the client or the hub follows in parentheses if
    it is one short line.
    """
    from huggingface_hub import constants

    error = _origin(error)
    status = _status(error)
    if status is None and constants.HF_HUB_OFFLINE and not isinstance(error, ValueError):
        return "HF_HUB_OFFLINE is set: unset it to reach the hub"
    text = str(error)
    original_message = in_brackets(getattr(error, "server_message", None) or " ".join(text.split()))
    if status in (401, 403):
        name = "check the name, or " if permission == "read" else ""
        login = f"run `hf auth login` with a token that may {permission} it"
        return f"access is refused, status {status}; {name}{login}{advice}{original_message}"
    # The names of the configurations are only in the text of the error, not in a field.
    if configurations := re.search(r"(?i)available(?: configs)?: \[(.*?)\]", text, re.DOTALL):
        names = configurations[1].replace("'", "")[:DETAIL_CHARACTERS]
        return f"choose one of its configurations, as in {HUB}OWNER/NAME:CONFIG: {names}{advice}"
    # The client itself raises ValueError for an impossible name, and whenever a server answers with status 400.
    if status == 404 or (status is None and isinstance(error, ValueError)):
        problem = "not found" if status == 404 else "the request was not accepted"
        return f"{problem}; check the name{advice}{original_message}"
    return f"{_failure(error, status)}; rerun the same command to resume{advice}{original_message}"


def _failure(error: BaseException, status: int | None) -> str:
    """Return what went wrong: on the server, in the network or on this machine."""
    if status is not None:
        return f"the hub answers with status {status}"
    kind = type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # for example, a full disk
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "Timeout" in kind:
        return "no complete answer in time"
    if "Connect" in kind or isinstance(error, ConnectionError):
        return "no connection"
    return f"the transfer failed with {kind}"


def _origin(error: BaseException) -> BaseException:
    """Return the original error of the server or the network if the client has wrapped it in an error of its own."""
    causes = [error]
    while causes[-1].__cause__ is not None and len(causes) < LONGEST_CHAIN:
        causes.append(causes[-1].__cause__)
    server_error = next((cause for cause in causes if _status(cause) is not None), None)
    if server_error is not None:
        return server_error
    # These errors state only that something failed: "Dry run cannot be performed", "Error while uploading".
    is_wrapper = type(error) is RuntimeError or type(error).__name__ in ("DryRunError", "LocalEntryNotFoundError")
    return causes[1] if is_wrapper and len(causes) > 1 else error


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
