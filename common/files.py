"""Atomic and durable writes of files and folders, file locks, file hashes, free disk, and errors of failed writes.

A lock is flock's: the system releases it however the process ends. Torch's filelock accepts a pipe at the path, refuses
a symbolic link, and does not tell a file system without locks from a file that cannot be opened.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO
from uuid import uuid4

from common.errors import BadInput, reason_of_system_error
from common.json_files import open_descriptor, open_regular, read_regular
from common.output import note, show

BLOCK_BYTES = 1 << 22
HUB = "hf:"  # may begin a name on the hub
LOCK_POLL_SECONDS = 0.2
PARTIAL = ".partial-"  # begins the hidden name of a file or folder that is being written
# A folder may lie on a file system, or belong to a user, that does not let it be synced: then nothing more can be done.
_UNSYNCABLE_FOLDER = (errno.EACCES, errno.EBADF, errno.EINVAL)
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of the file and its folder"),
    errno.EROFS: "this file system is read-only: choose another place",
    errno.EISDIR: "a folder has its name: move that away",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file stands where a folder is wanted: move that away"),
    errno.EBUSY: "it is mounted: choose a folder in it, or mount the folder around it",
    errno.ENXIO: "it is a pipe or a device: move that away",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "its folder does not exist: create it",
}
BUCKET_SCHEMES = ("s3", "gs", "az")
WEB_SCHEMES = ("http", "https")


class Locked(BadInput):
    """User error: another process holds a lock; once it has ended, the same command would do."""


def by_number(name: str) -> tuple[str, str]:
    """Return a sort key of file names by which a number counts as one: shard-9 comes before shard-10."""
    return re.sub("[0-9]+", lambda digits: f"{len(digits[0].lstrip('0')):04}{digits[0].lstrip('0')}", name), name


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give an OSError of the block the name of the file that it writes: the system names none when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: str | bytes, *, durable: bool = False, keep: bool = False) -> None:
    """Replace a file atomically: on an error it stays as it was. `durable`: sync it to the disk; `keep`: one there is.

    Of two processes or threads that replace one file, the second waits. A link at the path is replaced, and nothing is
    written through a link at the partial file's name.
    """
    if path.name in ("", ".."):  # a folder by its name, such as "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".partial-{path.name}")
    with naming(path), locked_partial(partial) as file:
        try:
            if keep and path.exists():
                partial.unlink()
                return
            # a name may hold what UTF-8 cannot: escaped, as in JSON
            file.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
            file.flush()
            if durable:
                sync(partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    if durable:
        sync(path.parent)


def check_replaceable(
    path: Path, sign: bytes | Callable[[bytes], bool], what: str, option: str | None = None
) -> int | None:
    """Raise BadInput if a path names anything except a file that we wrote, an empty file, or nothing.

    `sign`: bytes that each of our files contains, or a function that recognizes their content. `what`: the name of our
    files in the message. `option`: the option that chooses another path; None if there is no such option. Returns the
    size in bytes of the file that would be replaced, or None if there is none.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if option is None and is_folder(path):
            return None  # it cannot be replaced, and the one who writes says so
        advice = "move it away" if option is None else f"pass the name of a file as {option}"
        raise BadInput(f"{path}: {error.strerror or error}; {advice}") from error
    if content and not (sign(content) if callable(sign) else sign in content):
        advice = "move it away, or give it another name" if option is None else f"pass another {option}"
        size = f"{len(content):,} bytes"
        raise BadInput(f"{path}: is not {what}, and is left as it is ({size}); {advice}")
    return len(content)


@contextmanager
def locked_partial(partial: Path) -> Iterator[BinaryIO]:
    """Open an empty partial file, locked while it is written. What a kill has left there is overwritten."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        if not _is_plain(partial):
            partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file.fileno(), partial):  # else the process that had the lock has renamed it
                file.truncate()
                yield file
                return


def partial_of(path: Path) -> Path:
    """Return the hidden name, next to its final one, under which a file or folder is written."""
    return path.with_name(f"{PARTIAL}{path.name}")


@contextmanager
def partial_directory(directory: Path, contention: str, *, wait_seconds: float = 0.0) -> Iterator[Path]:
    """Yield an empty hidden folder to write into and then publish by `publish_folder`; otherwise it is removed.

    One process at a time has it, and what a killed process has left in it is removed first. Raises OSError, and Locked
    with the message `contention` if another process still has it after `wait_seconds`. A process that has waited should
    look whether the other one has published the folder.
    """
    partial = partial_of(directory)
    descriptor = _open_locked_folder(partial, contention, time.monotonic() + wait_seconds)
    try:
        for path in partial.iterdir():
            remove(path)
        yield partial
    finally:
        if _is_at(descriptor, partial):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def publish_folder(
    partial: Path,
    folder: Path,
    *,
    aside: Path | None = None,
    rename: Callable[[Path, Path], object] = Path.rename,
) -> None:
    """Make a folder that was written under a hidden name durable, and give it its final name in one step.

    A kill, a full disk or a power cut leaves nothing under the final name, or the complete folder. An older folder of
    that name is first renamed to `aside`, by `rename`, and stays there for the caller to remove; without `aside` it
    raises OSError unless it is empty. If the new name cannot be made durable, both folders get their names back before
    the OSError is raised.
    """
    _sync_tree(partial)
    older = aside if folder.exists() else None
    if older is not None:
        rename(folder, older)
    try:
        partial.rename(folder)
        _sync_folder(folder.parent)
        _sync_folder(folder.parent.parent)  # the parent may be new as well
    except OSError:
        if not partial.exists():
            folder.rename(partial)
        if older is not None:
            rename(older, folder)
        raise


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_locked(path: Path, contention: str, *, wait_seconds: float = 0.0) -> TextIO:
    """Open or create a regular file, and `lock` it until it is closed. Raises BadInput also for another kind."""
    with writing(path):
        file = os.fdopen(open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+", errors="replace")
    lock(file, path, contention, wait_seconds=wait_seconds)
    return file


def is_held(path: Path, *, absent: bool | None = None) -> bool | None:
    """Tell whether a process holds the lock of a file; None where that cannot be known, `absent` without the file."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once: a job that starts would try again
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return absent
    except OSError:  # a file system without locks, for one
        return None


def lock(file: IO[Any] | int, path: Path, contention: str, *, wait_seconds: float = 0.0) -> None:
    """Lock an open file for as long as it stays open; on a file system without locks, print a note instead.

    Raises Locked with the message `contention` when another process still holds the lock after `wait_seconds`.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Locked(contention) from None
            time.sleep(LOCK_POLL_SECONDS)
        except OSError as error:  # a file system without locks
            show(note(f"{path}: cannot be locked ({error}); make sure that no other process uses it"))
            return


def write_problem(path: Path | str, error: OSError) -> str:
    """Return the reason why a file cannot be written, and the remedy."""
    return f"{path}: cannot be written: {error.strerror or error}; {_ADVICE.get(error.errno or 0, 'fix this')}"


def write_error(path: Path | str, error: OSError) -> BadInput:
    """Return the user error of a file that cannot be written."""
    problem = f"{write_problem(path, error)}, then rerun the same command"
    return BadInput(problem, reason=reason_of_system_error(error))


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for an impossible name, such as one that is too long."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises for an impossible name


def free_disk(directory: Path) -> tuple[Path, int]:
    """Return the nearest folder there is of a directory that may not be there yet, and the bytes free on its disk."""
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    return existing, shutil.disk_usage(existing).free


def mounted_as(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return type and source of the file system of an absolute path; "" where the system does not tell."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, depth = "", 0
    for line in lines:
        mount, _, system = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4]))
        if (point == path or point in path.parents) and len(point.parts) >= depth:  # the last one hides those before
            found, depth = " ".join(system.split()[:2]), len(point.parts)
    return found


def seconds_since_written(path: Path) -> float:
    """Return the seconds since a file was written, by the clock of its own disk alone. Raises BadInput.

    A network file system has the clock of its server, so `time.time()` minus a file's time would compare two clocks.
    """
    probe = path.with_name(f".now-{uuid4().hex}")
    with writing(probe):
        try:
            probe.touch()
            return probe.stat().st_mtime - path.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def system_error(error: OSError) -> str:
    """Return "FILE: REASON" of an OSError, or the reason where no file is known."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


@contextmanager
def writing(path: Path | str, *, names_file: bool = False) -> Iterator[None]:
    """Raise an OSError of the block, which writes `path`, as BadInput; `names_file`: of the file that it names."""
    try:
        yield
    except OSError as error:
        raise write_error((names_file and error.filename) or path, error) from error


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _open_locked_folder(folder: Path, contention: str, deadline: float) -> int:
    """Make a folder if there is none, and return a descriptor by which this process has locked it.

    The process that had it may have renamed it meanwhile. Then the lock is on the renamed folder, and a new one is made
    and locked if the deadline allows.
    """
    while True:
        if folder.is_symlink():  # nothing is written through a link of that name
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # renamed just now
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                lock(descriptor, folder, contention, wait_seconds=max(0.0, deadline - time.monotonic()))
                if _is_at(descriptor, folder):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        if time.monotonic() >= deadline:
            raise Locked(contention)


def _sync_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _sync_tree(path)
        elif path.is_file() and not path.is_symlink():
            sync(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in _UNSYNCABLE_FOLDER:
            raise


def _is_plain(path: Path) -> bool:
    """Tell whether there is nothing, or a file of this user that has no second name."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()


def _is_at(descriptor: int, path: Path) -> bool:
    """Tell whether an open file or folder still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def is_bucket(url: str) -> bool:
    """Tell whether a URL is of a bucket, and has no credentials in it."""
    return re.fullmatch(rf"({'|'.join(BUCKET_SCHEMES)})://[\w.-]+(/[\w./=+-]+)?", url) is not None
