"""Input files of documents and parts of them, local or remote: refused where they have changed since the plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import attrs

from common.errors import BadInput
from common.remote_files import REMOTE, RemoteFile, look_up_remote

TEXT_SUFFIXES = (".txt", ".md", ".py")  # a file is a document
LINE_SUFFIXES = (".jsonl", ".json")  # a line is a document
COMPRESSED_SUFFIXES = tuple(f"{lines}{packed}" for lines in LINE_SUFFIXES for packed in (".gz", ".zst"))
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, *COMPRESSED_SUFFIXES, ".parquet")
RERUN = "the same command goes on when it is there"
MODIFIED = "mtime "  # before the nanoseconds of a local file's stamp


class Damaged(Exception):
    """A file violates its format; the message says how."""


@attrs.frozen
class Input:
    """One file of documents, as it was when the plan was made."""

    path: str  # or URL
    size_bytes: int
    stamp: str  # changes with the content: time of modification, or the server's tag

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises BadInput when it is missing, has changed, or may not be read."""
        if REMOTE in self.path:
            file = look_up_remote(self.path)  # from here on what is read is held to its tag
            self.compare(remote_input(file))
            return file.open()
        self.compare(look_up(self.path))
        with readable(self.path):
            return Path(self.path).open("rb")

    def compare(self, now: "Input") -> None:
        """Raise BadInput when the file that is there now is not this one."""
        if now != self:
            raise BadInput(
                f"{self.path}: changed since these tokens were begun: got {now.size_bytes:,} bytes of "
                f"{_readable_stamp(now.stamp)}, wanted {self.size_bytes:,} of {_readable_stamp(self.stamp)}; bring it "
                "back, or begin anew in another --output"
            )


@attrs.frozen
class Extent:
    """Bytes begin .. end of an input, row groups begin .. end of a Parquet file, or all of a compressed file.

    Lines and pieces of text that begin in the range belong to it; see tokens/documents/reader.py.
    """

    input: int  # index
    begin: int
    end: int


def look_up(path: str) -> Input:
    """Return a file as it is now. Raises BadInput when there is none."""
    if REMOTE in path:
        return remote_input(look_up_remote(path))
    with readable(path):
        status = Path(path).stat()
    return Input(path, status.st_size, f"{MODIFIED}{status.st_mtime_ns}")


def remote_input(file: RemoteFile) -> Input:
    return Input(file.url, file.size_bytes, file.stamp)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn an OSError of the block, which reads `path`, into BadInput."""
    try:
        yield
    except OSError as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{path}: cannot be read: {detail}; {RERUN}") from error


def _readable_stamp(stamp: str) -> str:
    """Return a stamp with a local file's time as a date."""
    nanoseconds = stamp.removeprefix(MODIFIED)
    if nanoseconds == stamp or not nanoseconds.isdigit():
        return stamp
    seconds, rest = divmod(int(nanoseconds), 10**9)
    when = datetime.fromtimestamp(seconds).astimezone()
    return f"{when:%Y-%m-%dT%H:%M:%S}.{rest:09}{when:%z}"
