"""Atomic commit of a checkpoint on a disk, so that a kill at any moment loses nothing.

All ranks of a node write a checkpoint under a hidden name and sync it; then the first rank renames it. A checkpoint
under its final name is complete and never changes; it can only be replaced, moved or removed as a whole. After a kill
and a call of `recover`, each checkpoint has its complete old content or its complete new content, or does not exist.
Failures are OSErrors that name the file.
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
    """Create a hidden checkpoint whose files have their full size, so that all ranks can write into them.

    Earlier leftovers are removed first.
    """
    _restore_replaced(path.parent)
    remove_stale(path.parent)
    partial_of(path).mkdir(parents=True)
    for file, size_bytes in sizes.items():
        with naming(partial_of(path) / file), (partial_of(path) / file).open("wb") as opened:
            opened.truncate(size_bytes)


def write_rows(path: Path, file: str, rows: Iterable[tuple[int, memoryview]]) -> None:
    """Write (offset in bytes, content) pairs into a file of a hidden checkpoint, and wait until they are durable."""
    with naming(partial_of(path) / file), (partial_of(path) / file).open("r+b") as opened:
        for offset_bytes, content in rows:
            opened.seek(offset_bytes)
            opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def write_state_and_manifest(path: Path, state: SavedState, pieces: Mapping[str, Sequence[WrittenBytes]]) -> None:
    """Complete a hidden checkpoint with its state and its manifest.

    Before that, both tensor files are read back and compared with the pieces that were written.
    """
    files = {file: _read_back(partial_of(path) / file, pieces[file]) for file in (WEIGHTS, OPTIMIZER)}
    digests = {file: entry.sha256 for file, entry in files.items()}
    state = attrs.evolve(state, state_sha256=combined_sha256(state.position.step, digests))
    text = state.text().encode()
    _write_durably(partial_of(path) / STATE, text)
    files[STATE] = _read_back(partial_of(path) / STATE, [WrittenBytes.of(0, text)])
    _write_durably(partial_of(path) / MANIFEST, manifest_text(files).encode())


def publish(path: Path) -> None:
    """Give a hidden checkpoint its final name, replacing an older checkpoint of the same step.

    A step is saved twice if its validation was interrupted and is repeated later. If the new checkpoint cannot be
    published, the older one gets its name back. After a kill, `recover` does this.
    """
    partial = partial_of(path)
    publish_folder(partial, path, aside=partial.with_name(f"{partial.name}{REPLACED}"), rename=rename)


def write_copy(path: Path, files: Mapping[str, Iterable[tuple[int, memoryview]]]) -> str | None:
    """Write a checkpoint from the (offset in bytes, content) pairs of its files, and publish it if it is intact.

    Returns a description of the damage if the checkpoint is damaged; otherwise None.
    """
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
        discard(path)  # does nothing after `publish`


def recover(directory: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted. Raises BadInput if the directory is not writable."""
    if os.path.lexists(directory):
        if not is_folder(directory):
            raise BadInput(f"{directory}: wanted a folder or a link to a folder; move it away, or mount its disk")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise write_error(directory, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    _restore_replaced(directory)


def copy_to_partial(source: Path, path: Path, copy: Callable[[str, str], object] = shutil.copy2) -> None:
    """Copy a checkpoint to the hidden name of `path`, so that it can be published. `copy` copies one file."""
    discard(path)  # a job that was killed here may have left files
    shutil.copytree(source, partial_of(path), copy_function=copy)


def _write_durably(file: Path, content: bytes) -> None:
    with naming(file):
        file.write_bytes(content)
    sync(file)
    sync(file.parent)


def _read_back(path: Path, pieces: Iterable[WrittenBytes]) -> FileDigest:
    """Read a file from its disk; return its size and hash. Raises OSError if it differs from the written pieces."""
    file_digest, end = hashlib.sha256(), 0
    with path.open("rb") as opened:
        if sys.platform == "linux":  # otherwise the pages in this machine's cache would be read
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for piece in sorted(pieces, key=lambda piece: piece.offset_bytes):
            assert piece.offset_bytes == end, "each byte must be written exactly once"
            end += piece.size_bytes
            piece_digest = hashlib.sha256()
            while block := opened.read(min(BLOCK_BYTES, end - opened.tell())):
                file_digest.update(block)
                piece_digest.update(block)
            if piece_digest.hexdigest() != piece.sha256:
                problem = f"bytes {piece.offset_bytes:,} to {end:,} on the disk differ from what was written"
                raise OSError(errno.EIO, problem, str(path))
        if opened.read(1):
            raise OSError(errno.EIO, f"has more than the {end:,} bytes that were written", str(path))
    return FileDigest(end, file_digest.hexdigest())


def _restore_replaced(directory: Path) -> None:
    for aside in directory.glob(f"{PARTIAL}*{REPLACED}"):
        path = directory / aside.name.removeprefix(PARTIAL).removesuffix(REPLACED)
        if not path.exists() or ((aside / MANIFEST).exists() and not (path / MANIFEST).exists()):
            remove(path)
            rename(aside, path)
