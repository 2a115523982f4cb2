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

from common.errors import BadInput, note, say
from common.files import BLOCK_BYTES, is_folder, naming, sync, write_error
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    OPTIMIZER,
    PARTIAL,
    REPLACED,
    STATE,
    WEIGHTS,
    archive,
    link_target,
    name_of,
    remove,
    rename,
    stale_partials,
    steps_in,
)
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


def partial_of(path: Path) -> Path:
    """Return the hidden path of a checkpoint or link that is being written."""
    return path.with_name(f"{PARTIAL}{path.name}")


def create_partial(path: Path, sizes: Mapping[str, int]) -> None:
    """Create a hidden checkpoint, its files at full size, for all ranks to write into; remove what others have left."""
    _restore_replaced(path.parent)
    _remove_stale(path.parent)
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
    """Rename a hidden checkpoint, in the place of an older one; where that cannot be synced, undo it and raise."""
    partial = partial_of(path)
    if path.exists():  # the same step again: saved before its validation
        rename(path, partial.with_name(f"{partial.name}{REPLACED}"))
    try:
        partial.rename(path)
        sync(path.parent)
        sync(path.parent.parent)  # the first checkpoint's folder is new as well
    except OSError:
        if not partial.exists():
            path.rename(partial)
        _restore_replaced(path.parent)
        raise


def discard(path: Path) -> None:
    shutil.rmtree(partial_of(path), ignore_errors=True)


def write_copy(path: Path, files: Mapping[str, Iterable[tuple[int, memoryview]]]) -> str | None:
    """Write a checkpoint of (offset in bytes, content) pairs; publish it if it is intact, else return its damage."""
    partial = partial_of(path)
    try:
        create_partial(path, dict.fromkeys(files, 0))
        for file, pieces in files.items():
            write_rows(path, file, pieces)
        sync(partial)
        if (problem := verify(partial)) is not None:
            return problem.replace(str(partial), str(path))
        publish(path)
        return None
    finally:
        discard(path)  # unless it is published


def prune_checkpoints(directory: Path, newest: str, best_step: int | None, keep: int) -> None:
    """Make the links refer to the newest and the best checkpoint, and delete all but those and the newest `keep`."""
    point(directory / "latest", newest)
    # Each time, not only for a new best one: a kill may have come between that one's publication and its link.
    point_best(directory, best_step)
    kept = {link_target(directory / link) for link in LINKS}
    for name in steps_in(directory)[:-keep]:
        if name not in kept:
            hidden = partial_of(directory / name)
            rename(directory / name, hidden)  # first: an interrupted deletion leaves no incomplete checkpoint
            remove(hidden)
    _remove_stale(directory)


def point_best(directory: Path, step: int | None) -> bool:
    """Make `best` refer to the checkpoint of a step, if there is one; return whether there is."""
    if step is None or not is_folder(directory / name_of(step)):
        return False
    point(directory / "best", name_of(step))
    return True


def point(link: Path, name: str | None) -> None:
    """Replace a symbolic link in one step, or remove it. A folder or other file of that name goes to the archive."""
    partial = partial_of(link)
    if link.is_symlink() and name is not None and link.readlink() == Path(name):
        return
    remove(partial)
    if link.exists() and link_target(link) is None:
        moved = archive(link.parent, [link.name])
        say(note(f"{link} is no link; it is now {moved / link.name}"))
    if name is None:
        link.unlink(missing_ok=True)
        return
    partial.symlink_to(name)
    partial.replace(link)
    sync(link.parent)


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
    for copied in (*partial_of(path).iterdir(), partial_of(path)):
        sync(copied)


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
        for piece in sorted(pieces, key=lambda each: each.offset_bytes):
            assert piece.offset_bytes == end, "each byte is written once"
            end += piece.size_bytes
            own = hashlib.sha256()
            while block := opened.read(min(BLOCK_BYTES, end - opened.tell())):
                whole.update(block)
                own.update(block)
            if own.hexdigest() != piece.sha256:
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


def _remove_stale(directory: Path) -> None:
    for path in stale_partials(directory):
        remove(path)
