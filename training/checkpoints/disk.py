"""Checkpoints on a disk: written under a hidden name, synced, then renamed, so that a kill at any moment loses nothing.

The disk is one that all ranks share: those of one node write rows in place.
"""

import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import attrs

from common.errors import BadInput, printable
from common.files import BLOCK_BYTES, is_folder, sha256, sync, write_error
from training.checkpoints import crash_points
from training.checkpoints.storage import (
    LINKS,
    MANIFEST,
    STEP_NAME,
    WEIGHTS,
    Checkpoint,
    FileDigest,
    NewFile,
    WrittenBytes,
)

CHECKPOINTS, ARCHIVE = "checkpoints", "archive"  # folders of a run directory
SET_ASIDE = ".archive"  # folder among checkpoints that are on another file system than the archive
PARTIAL = ".partial-"  # begins the hidden name of what is written or deleted
ASIDE = "-aside"  # ends the hidden name of a checkpoint that is being replaced
_OWN_HIDDEN_NAME = re.compile(rf"{re.escape(PARTIAL)}({STEP_NAME.pattern}({ASIDE})?|{'|'.join(LINKS)})")


@attrs.frozen
class Disk:
    """Storage in a folder, or a link to one. Its methods are described in `Storage`."""

    directory: Path

    def names(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(path.name for path in self.directory.iterdir() if _is_ours(path))

    def exists(self, name: str = "") -> bool:
        return is_folder(self.directory / name)

    def target(self, name: str) -> str | None:
        """Return what a symbolic link refers to: a name, where it lies in the same folder, else a path."""
        path = self.directory / name
        if not os.path.islink(path):  # noqa: PTH114  # Path.is_symlink raises for an impossible name
            return None
        link = path.readlink()
        here = (self.directory / link).parent.resolve() == self.directory.resolve()
        return link.name if here else str(link)

    def local_file(self, name: str, file: str) -> Path:
        return self.directory / name / file

    def where(self, name: str) -> str:
        return str(self.directory / name)

    def begin(self, name: str, files: Mapping[str, NewFile]) -> None:
        """Create the files at their full size, so that every rank can write at its offsets."""
        self._restore_replaced()
        self._remove_left_behind()
        partial = self._partial(name)
        partial.mkdir(parents=True)
        for file, new in files.items():
            with (partial / file).open("wb") as opened:
                opened.write(new.header)
                opened.truncate(new.size_bytes)

    def write_rows(self, name: str, file: str, rows: Iterable[tuple[int, memoryview]]) -> None:
        with (self._partial(name) / file).open("r+b") as opened:
            for offset_bytes, content in rows:
                opened.seek(offset_bytes)
                opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())

    def put(self, name: str, file: str, content: bytes) -> None:
        path = self._partial(name) / file
        path.write_bytes(content)
        sync(path)
        sync(path.parent)

    def entry(self, name: str, file: str, pieces: Sequence[WrittenBytes] | None = None) -> FileDigest:
        path = self._partial(name) / file
        return FileDigest(path.stat().st_size, sha256(path) if pieces is None else _compared_sha256(path, pieces))

    def publish(self, name: str) -> None:
        """Rename the hidden folder; where that cannot be synced, undo it and raise."""
        path, partial = self.directory / name, self._partial(name)
        if path.exists():  # the same step again: saved before its validation
            _rename(path, self._partial(f"{name}{ASIDE}"))
            crash_points.reached("old one aside")
        try:
            partial.rename(path)
            crash_points.reached("renamed")
            sync(self.directory)
            sync(self.directory.parent)  # the first checkpoint's folder is new as well
        except OSError:
            if not partial.exists():
                path.rename(partial)
            self._restore_replaced()
            raise
        crash_points.reached("durable")

    def discard(self, name: str) -> None:
        shutil.rmtree(self._partial(name), ignore_errors=True)

    def point(self, link: str, name: str | None) -> None:
        """Replace a symbolic link in one step, or remove it. A folder of that name goes to the archive."""
        path, partial = self.directory / link, self._partial(link)
        if path.is_symlink() and name is not None and path.readlink() == Path(name):
            return
        _remove(partial)
        if path.exists() and not path.is_symlink():
            moved = self.set_aside(new_archive(self.directory.parent), [link])
            print(printable(f"NOTE: {path} is no link; it is now {moved / link}"), file=sys.stderr)
        if name is None:
            path.unlink(missing_ok=True)
            return
        partial.symlink_to(name)
        crash_points.reached(f"{link} made")
        partial.replace(path)
        sync(self.directory)
        crash_points.reached(f"{link} moved")

    def remove(self, names: Sequence[str]) -> None:
        """Hide each folder before deleting it: an interrupted deletion leaves no incomplete checkpoint."""
        for name in names:
            hidden = self._partial(name)
            _rename(self.directory / name, hidden)
            crash_points.reached("deletion hidden")
            _remove(hidden)
            crash_points.reached("deleted")
        self._remove_left_behind()

    def recover(self) -> None:
        if os.path.lexists(self.directory):
            if not is_folder(self.directory):
                raise BadInput(f"{self.directory}: wanted a folder, or a link to one; move it away, or mount its disk")
            if not os.access(self.directory, os.W_OK | os.X_OK):
                raise write_error(self.directory, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        self._restore_replaced()

    def copy(self, source: str, name: str) -> None:
        partial = self._partial(name)
        shutil.rmtree(partial, ignore_errors=True)  # left by a start that was killed here
        shutil.copytree(self.directory / source, partial)
        for copied in (*partial.iterdir(), partial):
            sync(copied)

    def rename(self, old: str, new: str) -> None:
        _rename(self.directory / old, self.directory / new)

    def set_aside(self, archive: Path, names: Sequence[str] | None = None) -> Path:
        """Move folders into `archive/checkpoints/` and return it; None: all of them, hidden ones included.

        They stay on their file system: where the archive is on another, they go to `.archive/TIME/` beside the
        checkpoints, and `archive/checkpoints` is a link to it.
        """
        target = self._new_folder(archive)
        # in this order: a kill leaves the newest
        moved = [*sorted(path.name for path in self.left_behind()), *self.names()] if names is None else names
        for name in moved:
            _rename(self.directory / name, target / name)
        if names is None:
            with suppress(OSError):  # a link, a mount, or it holds more than checkpoints
                self.directory.rmdir()
        return target

    def left_behind(self) -> list[Path]:
        """Return what interrupted saves and deletions have hidden, which `begin` removes. Other names are not ours."""
        return [path for path in self.directory.glob(f"{PARTIAL}*") if _OWN_HIDDEN_NAME.fullmatch(path.name)]

    def _partial(self, name: str) -> Path:
        return self.directory / f"{PARTIAL}{name}"

    def _new_folder(self, archive: Path) -> Path:
        target, here = archive / self.directory.name, self.directory / SET_ASIDE / archive.name
        here.mkdir(parents=True)
        try:
            here.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            run = self.directory.parent.resolve()
            target.symlink_to(os.path.relpath(run / self.directory.name / SET_ASIDE / here.name, archive.resolve()))
            return here
        with suppress(OSError):  # others are there
            here.parent.rmdir()
        return target

    def _restore_replaced(self) -> None:
        for aside in self.directory.glob(f"{PARTIAL}*{ASIDE}"):
            path = self.directory / aside.name.removeprefix(PARTIAL).removesuffix(ASIDE)
            if not path.exists() or ((aside / MANIFEST).exists() and not (path / MANIFEST).exists()):
                _remove(path)
                _rename(aside, path)

    def _remove_left_behind(self) -> None:
        for path in self.left_behind():
            _remove(path)


def checkpoints_of(run_directory: Path) -> Disk:
    return Disk(run_directory / CHECKPOINTS)


def on_disk(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder, of a run or copied elsewhere."""
    return Checkpoint(Disk(path.parent), path.name)


def new_archive(run_directory: Path) -> Path:
    target = run_directory / ARCHIVE / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target


def _is_ours(path: Path) -> bool:
    """Tell whether a path is named by a run, or holds a checkpoint; a mounted disk has `lost+found`, for one."""
    if STEP_NAME.fullmatch(path.name) or path.name in LINKS:
        return True
    found = any(os.path.isfile(path / file) for file in (MANIFEST, WEIGHTS))  # noqa: PTH113  # False where not allowed
    return found and not path.name.startswith(".")


def _rename(path: Path, target: Path) -> None:
    """Rename a folder; one of a container's image, which overlayfs cannot rename, is copied and deleted.

    Its manifest is copied last and deleted first: a kill leaves it whole under one of both names.
    """
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns(MANIFEST))
        for copied in (*target.iterdir(), target):
            sync(copied)
        with suppress(FileNotFoundError):  # damaged
            shutil.copy2(path / MANIFEST, target)
            sync(target / MANIFEST)
            sync(target)
            (path / MANIFEST).unlink()
        _remove(path)


def _compared_sha256(path: Path, pieces: Iterable[WrittenBytes]) -> str:
    """Return the sha256 of a file, read back from its disk. Raises OSError where it differs from its pieces."""
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
        assert not opened.read(1), "all bytes are written"
    return whole.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
