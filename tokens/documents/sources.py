"""What the SOURCE arguments name, as files: local ones, remote ones that fsspec opens, those of a hub dataset."""

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from common.errors import BadInput
from common.hub_client import explained, quiet
from tokens.documents.remote import GO_ON, REMOTE, find_remote, look_up_remote, open_remote

TEXT_SUFFIXES = (".txt", ".md", ".py")  # a file is a document
LINE_SUFFIXES = (".jsonl", ".json")  # a line is a document
COMPRESSED_SUFFIXES = tuple(f"{lines}{packed}" for lines in LINE_SUFFIXES for packed in (".gz", ".zst"))
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, *COMPRESSED_SUFFIXES, ".parquet")
STANDARD_LIBRARY = "stdlib"
HUB = "hf:"
MODIFIED = "mtime "  # then nanoseconds
COMMIT = re.compile("@([0-9a-f]{40})/")  # in the URL of a hub dataset's file


class Damaged(Exception):
    """What a file holds is not what its format says. The message says how."""


@attrs.frozen
class Input:
    """One file of documents, as it was when the plan was made."""

    path: str  # or URL
    size_bytes: int
    stamp: str  # another one when the content may have changed: time of modification, or the server's tag

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises BadInput when it is gone, is not what it was, or may not be read."""
        # Opened before it is looked at: from here on s3fs holds what it reads to the tag of what was opened.
        stream = open_remote(self.path) if REMOTE in self.path else None
        self.check_unchanged()
        with readable(self.path):
            return stream or Path(self.path).open("rb")

    def check_unchanged(self) -> None:
        """Raise BadInput when the file is gone, or is not what it was."""
        self.compare(look_up(self.path))

    def compare(self, now: "Input") -> None:
        """Raise BadInput when the file that is there now is not this one."""
        if now != self:
            raise BadInput(
                f"{self.path}: changed since these tokens were begun: got {now.size_bytes:,} bytes of "
                f"{_readable_stamp(now.stamp)}, wanted {self.size_bytes:,} of {_readable_stamp(self.stamp)}; bring it "
                "back, or begin anew in another --output"
            )


@attrs.frozen
class Source:
    """One SOURCE argument."""

    name: str
    inputs: tuple[Input, ...]

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.inputs)


def resolve_sources(
    names: list[str], kept: Iterable[Source] = (), say: Callable[[str], None] = lambda line: None
) -> list[Source]:
    """Return the files behind each SOURCE, in an order that depends on their names alone.

    `kept`: of the plan that is gone on with; a hub dataset that it has is taken at the same commit. `say` is told what
    may surprise. Raises BadInput where there are no files, for those of an unknown kind, and what cannot be read.
    """
    sources = [Source(name, tuple(_resolve(name, kept, say))) for name in names]
    counts = Counter(item.path for source in sources for item in source.inputs)
    twice = [path for path, count in counts.items() if count > 1]
    if twice:
        say(f"NOTE: named twice, so prepared twice: {_first(twice)}")
    return sources


def look_up(path: str) -> Input:
    """Return size and stamp of a file. Raises BadInput when there is none."""
    if REMOTE in path:
        return _remote(path, look_up_remote(path))
    with readable(path):
        status = Path(path).stat()
    return Input(path, status.st_size, f"{MODIFIED}{status.st_mtime_ns}")


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise BadInput naming the file for what the machine says when it is read."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {_detail(error)}; {GO_ON}") from error


def _resolve(name: str, kept: Iterable[Source], say: Callable[[str], None]) -> list[Input]:
    if name.startswith(HUB):
        paths = [item.path for source in kept if source.name == name for item in source.inputs]
        return _hugging_face(name, next((commit for path in paths for commit in COMMIT.findall(path)), None))
    if name == STANDARD_LIBRARY:
        return [look_up(str(path)) for path in _standard_library()]
    others: list[str] = []  # of a folder, which holds other things as well
    if REMOTE in name:
        found = _remote_files(name, others)
    else:
        found = [look_up(str(path.absolute())) for path in _local_files(name, others)]
    if others:
        say(f"NOTE: {name}: files of other kinds are left out: {_first(others)}")
    return sorted(found, key=lambda item: item.path)


def _local_files(name: str, others: list[str]) -> list[Path]:
    path = Path(name)
    with readable(name):
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        found = []
        for file in _files_below(path, others):
            if file.name.endswith(SUFFIXES):
                found.append(file)
            elif not file.name.startswith("."):
                others.append(str(file))
        if not found:
            raise BadInput(f"{name}: a folder without documents; wanted files ending in {', '.join(SUFFIXES)}")
        return found
    found = [path] if is_file else [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207  # absolute patterns
    found = [file for file in found if file.is_file()]
    if not found:
        raise BadInput(f"{name}: no such file, folder or glob; quote a glob so that the shell leaves it alone")
    for file in found:
        _check_kind(str(file))
    return found


def _files_below(top: Path, others: list[str]) -> Iterator[Path]:
    """Yield a folder's files and symbolic links that lead nowhere; not those of token directories in it: `others`."""

    def refuse(error: OSError) -> None:
        with readable(error.filename):
            raise error

    seen = set()  # links may lead in circles
    for name, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        folder = Path(name)
        of_tokens = _is_of_tokens(files)
        if of_tokens and folder == top:
            raise BadInput(f"{top}: holds tokens; name a folder of documents")
        if of_tokens:
            others.append(str(folder))
        if of_tokens or folder.resolve() in seen:
            folders.clear()
            continue
        seen.add(folder.resolve())
        folders.sort()
        for file in files:
            path = folder / file
            with readable(str(path)):
                wanted = path.is_file() or not path.exists()
            if wanted:
                yield path


def _is_of_tokens(names: Iterable[str]) -> bool:
    """Tell whether a folder with files of these names is a token directory: finished, or not yet."""
    names = set(names)
    begun = any(name in {"ledger.jsonl", ".lock"} or name.startswith(".checkpoint-") for name in names)
    return "plan.json" in names and begun


def _remote_files(name: str, others: list[str]) -> list[Input]:
    found = find_remote(name)
    if not glob.has_magic(name) and name not in found:
        names: dict[str, list[str]] = {}  # by folder
        for url in found:
            names.setdefault(url.rpartition("/")[0], []).append(url.rpartition("/")[2])
        tokens = tuple(f"{folder}/" for folder, files in names.items() if _is_of_tokens(files))
        left_out = {url for url in found if not url.endswith(SUFFIXES) or url.startswith(tokens)}
        others += sorted(left_out)
        found = {url: entry for url, entry in found.items() if url not in left_out}
    if not found:
        raise BadInput(f"{name}: holds no documents; wanted files ending in {', '.join(SUFFIXES)}")
    for url in found:
        _check_kind(url)
    return [_remote(url, entry) for url, entry in found.items()]


def _remote(url: str, entry: dict[str, Any]) -> Input:
    tags = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime")
    tag = next((f"{key} {entry[key]}" for key in tags if entry.get(key)), "no tag")
    if entry.get("size") is None:
        raise BadInput(f"{url}: its server does not tell how long it is; download it first")
    return Input(url, int(entry["size"]), tag.replace('"', ""))


def _hugging_face(name: str, commit: str | None) -> list[Input]:
    """Return the data files of hf:OWNER/NAME[:CONFIG][@REVISION], its train split.

    At a commit; where it is None, at the one that the revision, or else the main branch, is at now.
    """
    import datasets
    import fsspec

    quiet()
    dataset, _, revision = name.removeprefix(HUB).partition("@")
    repository, _, configuration = dataset.partition(":")
    try:
        builder = datasets.load_dataset_builder(repository, configuration or None, revision=commit or revision or None)
        urls = [str(url) for url in (builder.config.data_files or {}).get("train", [])]
        file_system = fsspec.filesystem("hf")
        inputs = [_remote(url, file_system.info(url)) for url in urls]
    except BadInput:
        raise
    except Exception as error:  # unknown names, and whatever the client's transport raises
        raise BadInput(f"{name}: cannot be resolved on the hub: {explained(error, 'read')}") from error
    if not inputs:
        raise BadInput(f"{name}: no files of a train split; name its files: hf://datasets/{repository}/...")
    for item in inputs:
        _check_kind(item.path)
    return inputs


def _standard_library() -> tuple[Path, ...]:
    """Return the running Python's own library sources, without installed packages and without its test suites.

    In the order of a hash of their names, so that any range of them is a fair sample of all.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)]
    return tuple(sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest()))


def _check_kind(path: str) -> None:
    if path.endswith(".bin"):
        raise BadInput(f"{path}: unknown kind of document: .bin, as nanoGPT's tokens, is not read; name their text")
    if not path.endswith(SUFFIXES):
        raise BadInput(f"{path}: unknown kind of document; wanted a name ending in {', '.join(SUFFIXES)}")


def _detail(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _readable_stamp(stamp: str) -> str:
    """Return a stamp with a local file's time in a form that people read."""
    nanoseconds = stamp.removeprefix(MODIFIED)
    if nanoseconds == stamp or not nanoseconds.isdigit():
        return stamp
    seconds, rest = divmod(int(nanoseconds), 10**9)
    when = datetime.fromtimestamp(seconds).astimezone()
    return f"{when:%Y-%m-%dT%H:%M:%S}.{rest:09}{when:%z}"


def _first(paths: list[str]) -> str:
    return min(paths) + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")
