"""Hugging Face hub client: names, login, upload, and explained errors."""

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
NAME_PATTERN = r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?"  # of a model: old ones have no owner
OUR_FOLDERS = ("runs/", "token_files/")
OUR_TAG = "lockstep"  # in the card of a model that `evaluate.py export` has written
CARD_BYTES = 1 << 14  # of a card, in which its metadata are looked for
CLOSE = 0.84  # likeness of two names, by difflib, from which one may be a typing error of the other
LONGEST_CHAIN = 20  # of errors that caused each other
DETAIL_CHARACTERS = 500  # shown of a list of the hub in an error


def hub_name(reference: str, what: str, folders: Iterable[Path], is_one: Callable[[Path], bool]) -> str:
    """Return the name on the hub of a model or dataset that is no local folder: OWNER/NAME, a model's also NAME alone.

    With hf: in front a name is always one of the hub. Without it, a name that is close to a local one is refused with
    that one, so that a typing error does not begin a download.

    Arguments:
        reference: as on the command line or in a file
        what: DATASET or MODEL
        folders: where local ones are
        is_one: tells whether a folder is one of these

    Raises BadInput.
    """
    name, pattern = reference.removeprefix(HUB), REPOSITORY if what == DATASET else NAME_PATTERN
    if reference.startswith(HUB) and re.fullmatch(pattern, name, re.ASCII):
        return name
    near = nearest_folder(reference, folders, is_one)
    on_hub = re.fullmatch(pattern, name, re.ASCII) is not None
    is_local = "/" in reference and is_folder(Path(reference).parent)
    if near is None and on_hub and not is_local:
        return name
    meant = "" if near is None else f"did you mean {near}? "
    advice = f"for a {what.rpartition(' ')[0]} of the hub write {HUB}{name}"
    if not on_hub:
        advice = f"wanted a {what}, or OWNER/NAME on the hub"
    raise BadInput(f"{reference}: no such directory; {meant}{advice}")


@functools.cache
def note_local(reference: str, what: str, other: str = "") -> None:
    """Say once that a local path is read although its name is that of a repository as well.

    Nobody asks the hub whether it has a repository of that name: the answer would need the network. `other` is how to
    ask for that one. Names in the folders where our commands put runs and tokens are meant as local ones, and so is
    a path that begins with ./. Call it only for a folder that may be somebody else's: what this program has made, and
    a folder with a user's own texts, is what the user means day by day.
    """
    if re.fullmatch(REPOSITORY, reference, re.ASCII) and not reference.startswith(OUR_FOLDERS):
        kind = what.rpartition(" ")[0]
        other = other or f"write {HUB}{reference}"
        show(note(f"{reference}: reads the local path of this name; for a {kind} of the hub {other}"), once=True)


def is_own_export(directory: Path) -> bool:
    """Tell whether `evaluate.py export` has written a model directory, by the tags of its card."""
    try:
        with (directory / CARD).open("rb") as file:
            head = file.read(CARD_BYTES)
    except OSError:
        return False
    front_matter = head.partition(b"\n---")[0].splitlines()
    return front_matter[:1] == [b"---"] and f"- {OUR_TAG}".encode() in front_matter


def nearest_folder(reference: str, folders: Iterable[Path], is_one: Callable[[Path], bool]) -> Path | None:
    """Return the local folder that a name is close to: the same name elsewhere, or a typing error; None without one."""
    wanted = Path(reference)
    places = dict.fromkeys([Path(), *folders, wanted.parent])
    likeness: dict[Path, float] = {}
    for path in (path for place in places for path in _folders_in(place)):
        pairs = [(path.name, wanted.name), *([(str(path), reference)] if "/" in reference else [])]
        # The last part must be alike as well: two paths of one folder have most of their characters in common.
        likeness[path] = min(
            difflib.SequenceMatcher(None, spelled[-QUOTED_CHARACTERS:], given[-QUOTED_CHARACTERS:]).ratio()
            for spelled, given in pairs
        )
    close = sorted((path for path in likeness if likeness[path] >= CLOSE), key=lambda path: -likeness[path])
    return next(filter(is_one, close), None)


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
    _bound_requests()
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{problem}: {explained(error, wanted, advice)}") from error


@functools.cache
def _bound_requests() -> None:
    """Give the hub's client, which has no timeout of its own, the limits of `common.transports`, once."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    set_client_factory(lambda: bounded(default_client_factory()))


def explained(error: BaseException, wanted: str = "write to", advice: str = "") -> str:
    """Return an error of the hub client as one line of ours, with what to do, and `advice`.

    `wanted` is what the access token must allow. The client's or the hub's own words follow in brackets if they are one
    short line.
    """
    from huggingface_hub import constants

    error = _origin(error)
    status = _status(error)
    if status is None and constants.HF_HUB_OFFLINE and not isinstance(error, ValueError):
        return "HF_HUB_OFFLINE is set: unset it to reach the hub"
    text = str(error)
    said = in_brackets(getattr(error, "server_message", None) or " ".join(text.split()))
    if status in (401, 403):
        name = "check the name, or " if wanted == "read" else ""
        login = f"run `hf auth login` with a token that may {wanted} it"
        return f"access is refused, status {status}; {name}{login}{advice}{said}"
    # The configurations are in the text of the error alone.
    if listed := re.search(r"(?i)available(?: configs)?: \[(.*?)\]", text, re.DOTALL):
        names = listed[1].replace("'", "")[:DETAIL_CHARACTERS]
        return f"wanted one of its configurations, as {HUB}OWNER/NAME:CONFIG: {names}{advice}"
    # The client raises ValueError itself for an impossible name, and for each answer 400 of a server.
    if status == 404 or (status is None and isinstance(error, ValueError)):
        return f"{'not found' if status == 404 else 'the request is not accepted'}; check the name{advice}{said}"
    return f"{_failure(error, status)}; rerun the same command to resume{advice}{said}"


def _failure(error: BaseException, status: int | None) -> str:
    """Return what went wrong at the server, on the network or on this machine."""
    if status is not None:
        return f"the hub answers with status {status}"
    kind = type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # a full disk, for one
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "Timeout" in kind:
        return "no whole answer in time"
    if "Connect" in kind or isinstance(error, ConnectionError):
        return "no connection"
    return f"the transfer failed with {kind}"


def _origin(error: BaseException) -> BaseException:
    """Return the answer of the server, or of the network, in the place of an error that the client made of it."""
    causes = [error]
    while causes[-1].__cause__ is not None and len(causes) < LONGEST_CHAIN:
        causes.append(causes[-1].__cause__)
    answered = next((cause for cause in causes if _status(cause) is not None), None)
    if answered is not None:
        return answered
    # These say only that something failed: "Dry run cannot be performed", "Error while uploading".
    is_wrapper = type(error) is RuntimeError or type(error).__name__ in ("DryRunError", "LocalEntryNotFoundError")
    return causes[1] if is_wrapper and len(causes) > 1 else error


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
