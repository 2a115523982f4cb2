"""Atomic commit of a checkpoint on a disk: a kill at any moment loses nothing.

A checkpoint is written under a hidden name by all ranks of a node, synced, and renamed by the first: under its own name
it is complete, and never changes; it is replaced, moved or removed as a whole. After a kill and `recover` each name has
its complete old content, its complete new content, or none. Failures are OSErrors that name the file.
"""

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import BLOCK_BYTES, PARTIAL, is_folder, naming, partial_of, publish_folder, remove, sync, write_error
from training.checkpoints.directory import (
    MANIFEST,
    OPTIMIZER,
    REPLACED,
    STATE,
    WEIGHTS,
    rename,
)
from training.checkpoints.retention import discard, remove_stale
from training.checkpoints.saved_state import FileDigest, SavedState, combined_sha256, manifest_text, verify


@attrs.frozen
class WrittenBytes:
    """Consecutive bytes of a checkpoint file, hashed in memory."""

    offset_bytes: int
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, offset_bytes: int, content: bytes | memoryview) -> "WrittenBytes":
        return cls(offset_bytes, len(content), hashlib.sha256(content).hexdigest())


def create_partial(path: Path, sizes: Mapping[str, int]) -> None:
    """Create a hidden checkpoint, its files at full size, for all ranks to write into; remove what others have left."""
    _restore_replaced(path.parent)
    remove_stale(path.parent)
    partial_of(path).mkdir(parents=True)
    for file, size_bytes in sizes.items():
        with naming(partial_of(path) / file), (partial_of(path) / file).open("wb") as opened:
            opened.truncate(size_bytes)


def write_rows(path: Path, file: str, rows: Iterable[tuple[int, memoryview]]) -> None:
    """Write (offset in bytes, content) pairs into a file of a hidden checkpoint and wait until they are durable."""
    with naming(partial_of(path) / file), (partial_of(path) / file).open("r+b") as opened:
        for offset_bytes, content in rows:
            opened.seek(offset_bytes)
            opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def write_state_and_manifest(path: Path, state: SavedState, written: Mapping[str, Sequence[WrittenBytes]]) -> None:
    """Read back both tensor files of a hidden checkpoint, compare them with what was `written`, then add the rest."""
    files = {file: _compared(partial_of(path) / file, written[file]) for file in (WEIGHTS, OPTIMIZER)}
    digests = {file: entry.sha256 for file, entry in files.items()}
    state = attrs.evolve(state, state_sha256=combined_sha256(state.position.step, digests))
    text = state.text().encode()
    _put(partial_of(path) / STATE, text)
    files[STATE] = _compared(partial_of(path) / STATE, [WrittenBytes.of(0, text)])
    _put(partial_of(path) / MANIFEST, manifest_text(files).encode())


def publish(path: Path) -> None:
    """Give a hidden checkpoint its final name. An older one of the step is replaced.

    A step is saved twice if its validation was interrupted and is made up for. The older checkpoint gets its name back
    if the new one cannot be published, or by `recover` after a kill.
    """
    partial = partial_of(path)
    publish_folder(partial, path, aside=partial.with_name(f"{partial.name}{REPLACED}"), rename=rename)


def write_copy(path: Path, files: Mapping[str, Iterable[tuple[int, memoryview]]]) -> str | None:
    """Write a checkpoint of (offset in bytes, content) pairs; publish it if it is intact, else return its damage."""
    partial = partial_of(path)
    try:
        create_partial(path, dict.fromkeys(files, 0))
        for file, pieces in files.items():
            write_rows(path, file, pieces)
        if (problem := verify(partial)) is not None:
            return problem.replace(str(partial), str(path))
        publish(path)
        return None
    finally:
        discard(path)  # unless it is published


def recover(directory: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted. Raises BadInput where nothing can be written."""
    if os.path.lexists(directory):
        if not is_folder(directory):
            raise BadInput(f"{directory}: wanted a folder, or a link to one; move it away, or mount its disk")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise write_error(directory, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    _restore_replaced(directory)


def copy_to_partial(source: Path, path: Path, copy: Callable[[str, str], object] = shutil.copy2) -> None:
    """Copy a checkpoint to a hidden one, each file by `copy`, to be published."""
    discard(path)  # left by a start that was killed here
    shutil.copytree(source, partial_of(path), copy_function=copy)


def _put(file: Path, content: bytes) -> None:
    with naming(file):
        file.write_bytes(content)
    sync(file)
    sync(file.parent)


def _compared(path: Path, pieces: Iterable[WrittenBytes]) -> FileDigest:
    """Return size and hash of a file, read back from its disk. Raises OSError where it differs from its pieces."""
    whole, end = hashlib.sha256(), 0
    with path.open("rb") as opened:
        if sys.platform == "linux":  # else this machine's cached pages would be compared
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for piece in sorted(pieces, key=lambda piece: piece.offset_bytes):
            assert piece.offset_bytes == end, "each byte is written once"
            end += piece.size_bytes
            digest = hashlib.sha256()
            while block := opened.read(min(BLOCK_BYTES, end - opened.tell())):
                whole.update(block)
                digest.update(block)
            if digest.hexdigest() != piece.sha256:
                wrong = f"bytes {piece.offset_bytes:,} to {end:,} are read back other than they were written"
                raise OSError(errno.EIO, wrong, str(path))
        if opened.read(1):
            raise OSError(errno.EIO, f"has more than the {end:,} bytes that were written", str(path))
    return FileDigest(end, whole.hexdigest())


def _restore_replaced(directory: Path) -> None:
    for aside in directory.glob(f"{PARTIAL}*{REPLACED}"):
        path = directory / aside.name.removeprefix(PARTIAL).removesuffix(REPLACED)
        if not path.exists() or ((aside / MANIFEST).exists() and not (path / MANIFEST).exists()):
            remove(path)
            rename(aside, path)
