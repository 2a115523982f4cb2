"""Checkpoint storage: the operations that a disk implements. A bucket gets copies (bucket_upload.py).

A storage holds checkpoints, flat folders of files, under names, and links: names that refer to a checkpoint and serve
people only. Between `begin` and `publish` a checkpoint is hidden: it is not among `names()`.

An implementation may assume:
- Rank 0 alone changes the storage, one call at a time; but every rank of its node calls `write_rows`, once for each
  tensor file, between `begin` and the first `entry`. Together they write each byte after the header exactly once.
- Hidden files are read by `entry` only.
- The manifest is the last file that `put` receives. A checkpoint without an intact manifest does not exist.
- A published checkpoint never changes; it is replaced, renamed, moved or removed as a whole.

An implementation guarantees:
- After `publish` returns, the checkpoint survives a power failure. After a kill at any moment, and `recover`, each name
  has its complete old content, its complete new content, or none.
- Failures are OSErrors that name the file.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

STEP_NAME = re.compile(r"step-(\d{8})")  # names that a run gives; copies may have any other
LINKS = ("latest", "best")
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


def name_of(step: int) -> str:
    """Return the checkpoint name of a step; names sort by step."""
    return f"step-{step:08d}"


@attrs.frozen
class NewFile:
    """A file to be filled by all ranks."""

    header: bytes
    size_bytes: int  # header included


@attrs.frozen
class FileDigest:
    """Size and hash of a file: its entry in the manifest."""

    size_bytes: int
    sha256: str


@attrs.frozen
class WrittenBytes:
    """Consecutive bytes of a checkpoint file, hashed in memory."""

    offset_bytes: int
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, offset_bytes: int, content: bytes | memoryview) -> "WrittenBytes":
        return cls(offset_bytes, len(content), hashlib.sha256(content).hexdigest())


class Storage(Protocol):
    """Checkpoints of one run."""

    # Reading, on every rank

    def names(self) -> list[str]:
        """Return the names of checkpoints and links, sorted."""

    def exists(self, name: str = "") -> bool:
        """Return whether there is a checkpoint of this name, or a link to one; without a name: a storage."""

    def target(self, name: str) -> str | None:
        """Return the name that a link refers to, whether that exists or not; None for anything but a link."""

    def local_file(self, name: str, file: str) -> Path:
        """Return the path of a checkpoint's file on this machine's disk, downloaded first where it lies elsewhere."""

    def where(self, name: str) -> str:
        """Return the address of a checkpoint for messages."""

    # One save

    def begin(self, name: str, files: Mapping[str, NewFile]) -> None:
        """Create a hidden checkpoint with files of these sizes, after removing what interrupted saves left behind."""

    def write_rows(self, name: str, file: str, rows: Iterable[tuple[int, memoryview]]) -> None:
        """Write (offset in bytes, content) pairs into a hidden file and wait until they are durable."""

    def put(self, name: str, file: str, content: bytes) -> None:
        """Add a small file to a hidden checkpoint and wait until it is durable."""

    def entry(self, name: str, file: str, pieces: Sequence[WrittenBytes] | None = None) -> FileDigest:
        """Return size and hash of a hidden file, read back; OSError where that differs from these pieces of it."""

    def publish(self, name: str) -> None:
        """Give a hidden checkpoint its name; an older checkpoint of that name disappears with the next `remove`."""

    def discard(self, name: str) -> None:
        """Remove a hidden checkpoint, ignoring errors."""

    def point(self, link: str, name: str | None) -> None:
        """Make a link refer to a checkpoint, without a moment at which there is no link; None removes the link."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove checkpoints, and what interrupted operations left behind."""

    # Before a run starts

    def recover(self) -> None:
        """Restore a checkpoint whose replacement was interrupted. Raises BadInput where nothing can be written."""

    def copy(self, source: str, name: str) -> None:
        """Copy a checkpoint to a hidden one, to be published."""

    def rename(self, old: str, new: str) -> None:
        """Rename a checkpoint to a name that is free."""

    def set_aside(self, archive: Path, names: Sequence[str] | None = None) -> Path:
        """Move checkpoints into an archive folder of the run; return where they are. None: the whole storage."""


@attrs.frozen
class Checkpoint:
    """One checkpoint: its storage and its name there."""

    storage: Storage
    name: str

    def file(self, name: str) -> Path:
        """Return the path of one of its files on this machine's disk."""
        return self.storage.local_file(self.name, name)

    def __str__(self) -> str:
        return self.storage.where(self.name)


def steps_in(storage: Storage) -> list[str]:
    """Return the names of checkpoints that a run wrote, oldest first; copies under other names are left alone."""
    return [name for name in storage.names() if STEP_NAME.fullmatch(name)]


def followed_links(storage: Storage) -> list[str]:
    """Return the links that are folders, the newest first: made by a copy of a run that followed links."""
    return [link for link in LINKS if storage.exists(link) and storage.target(link) is None]
