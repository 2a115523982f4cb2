"""Atomic and durable writes of files and folders, file locks, file hashes, free disk space, and write errors.

Locks use flock, because the system releases such a lock no matter how the process ends. The package filelock, which
torch installs, is not used: it accepts a pipe at the path, refuses a symbolic link, and does not distinguish a file
system without locks from a file that cannot be opened.
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
HUB = "hf:"  # optional prefix of a name on the Hugging Face hub
LOCK_POLL_SECONDS = 0.2
PARTIAL = ".partial-"  # prefix of the hidden name of a file or folder that is being written
# Syncing a folder raises these errors on some file systems, and if the folder belongs to another user. Nothing can be
# done about them, so they are ignored.
_UNSYNCABLE_FOLDER = (errno.EACCES, errno.EBADF, errno.EINVAL)
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of the file and its folder"),
    errno.EROFS: "this file system is read-only: choose another place",
    errno.EISDIR: "a folder has this name: move the folder away",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file has the name of a folder in this path: move the file away"),
    errno.EBUSY: "it is a mount point: choose a folder inside it, or mount its parent folder",
    errno.ENXIO: "it is a pipe or a device: move it away",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "its folder does not exist: create it",
}
BUCKET_SCHEMES = ("s3", "gs", "az")
WEB_SCHEMES = ("http", "https")


class Locked(BadInput):
    """User error: another process holds a lock. The same command will work after that process has ended."""


def by_number(name: str) -> tuple[str, str]:
    """Return a natural sort key for a file name: shard-9 sorts before shard-10."""
    return re.sub("[0-9]+", lambda digits: f"{len(digits[0].lstrip('0')):04}{digits[0].lstrip('0')}", name), name


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """If the block raises an OSError that names no file, add `path` to it as the name of the file.

    When a disk is full, for example, the system's error does not say which file was being written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def sync(path: Path) -> None:
    """Sync a file, or a directory's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: str | bytes, *, durable: bool = False, keep_existing: bool = False) -> None:
    """Replace a file atomically: after an error, the old file is unchanged.

    `durable` syncs the new file to the disk. With `keep_existing`, an existing file is not replaced.

    If two processes or threads replace the same file, the second one waits. If the path is a symbolic link, the link
    itself is replaced. A link under the name of the partial file is removed first, so nothing is written through it.
    """
    if path.name in ("", ".."):  # such a path is always a folder: ".", ".." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".partial-{path.name}")
    with naming(path), locked_partial(partial) as file:
        try:
            if keep_existing and path.exists():
                partial.unlink()
                return
            # A file name in the text may contain bytes that are not UTF-8; they are escaped, as in JSON.
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
    path: Path, sign: bytes | Callable[[bytes], bool], description: str, option: str | None = None
) -> int | None:
    """Raise BadInput if a path has a file with content that this program did not write.

    Return the size in bytes of the file that would be replaced, or None if there is no file.

    Arguments:
        sign: bytes that each of our files contains, or a function that recognizes their content
        description: what our files are called in the message, such as "a chart of train.py"
        option: the option with which the user can choose another path; None if there is no such option
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if option is None and is_folder(path):
            return None  # the later write will fail with a message of its own
        advice = "move it away" if option is None else f"pass the name of a file as {option}"
        raise BadInput(f"{path}: {error.strerror or error}; {advice}") from error
    if content and not (sign(content) if callable(sign) else sign in content):
        advice = "move it away, or give it another name" if option is None else f"pass another {option}"
        size = f"{len(content):,} bytes"
        raise BadInput(f"{path}: is not {description}, so it was not overwritten ({size}); {advice}")
    return len(content)


@contextmanager
def locked_partial(partial: Path) -> Iterator[BinaryIO]:
    """Open an empty partial file that is locked while it is written.

    A partial file that a killed process has left behind is overwritten.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        if not _is_plain(partial):
            partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
            with suppress(OSError):  # the file system may have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file.fileno(), partial):  # otherwise the previous holder of the lock has renamed the file
                file.truncate()
                yield file
                return


def partial_of(path: Path) -> Path:
    """Return the hidden path under which a file or folder is written. It is in the same folder as the final path."""
    return path.with_name(f"{PARTIAL}{path.name}")


@contextmanager
def partial_directory(directory: Path, contention: str, *, wait_seconds: float = 0.0) -> Iterator[Path]:
    """Yield an empty hidden folder. Fill it and call `publish_folder`; a folder that is not published is removed.

    Only one process at a time can have the folder, and files that a killed process has left in it are removed first.
    Raises Locked with the message `contention` if another process still has the folder after `wait_seconds`, and
    OSError if the folder cannot be created or cleared. A process that has waited should check whether the other process
    has published the folder.
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
    """Sync a hidden folder to the disk, then give it its final name in one step.

    After a kill, a full disk or a power cut, the final name is either free or names the complete folder. If an older
    folder has that name, `rename` first moves it to `aside`, and the caller has to remove it. Without `aside`, an older
    folder causes an OSError unless it is empty. If the new name cannot be synced to the disk, both folders get their
    previous names back before the OSError is raised.
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
    """Remove a file, a link, or a folder with all its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_locked(path: Path, contention: str, *, wait_seconds: float = 0.0) -> TextIO:
    """Open or create a regular file, and `lock` it until it is closed.

    Raises BadInput if that fails or if the path is not a regular file.
    """
    with writing(path):
        file = os.fdopen(open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+", errors="replace")
    lock(file, path, contention, wait_seconds=wait_seconds)
    return file


def is_held(path: Path, *, absent: bool | None = None) -> bool | None:
    """Return whether a process holds the lock on a file.

    Return None if that cannot be determined, and `absent` if the file does not exist.
    """
    try:
        with open_regular(path) as file:
            # This lock is released immediately. It cannot keep a job from starting, because jobs try several times.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return absent
    except OSError:  # for example, the file system has no locks
        return None


def lock(file: IO[Any] | int, path: Path, contention: str, *, wait_seconds: float = 0.0) -> None:
    """Lock an open file until it is closed. On a file system without locks, print a note instead.

    Raises Locked with the message `contention` if another process still holds the lock after `wait_seconds`.
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
        except OSError as error:  # the file system has no locks
            show(note(f"{path}: cannot be locked ({error}); make sure that no other process uses it"))
            return


def write_problem(path: Path | str, error: OSError) -> str:
    """Return a message that says why a file cannot be written, and how to solve the problem."""
    return f"{path}: cannot be written: {error.strerror or error}; {_ADVICE.get(error.errno or 0, 'fix this')}"


def write_error(path: Path | str, error: OSError) -> BadInput:
    """Return the user error for a file that cannot be written."""
    problem = f"{write_problem(path, error)}, then rerun the same command"
    return BadInput(problem, reason=reason_of_system_error(error))


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for an impossible name, such as one that is too long."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises for an impossible name


def free_disk(directory: Path) -> tuple[Path, int]:
    """Return a path and the free bytes on its disk.

    The path is the directory itself or, if it does not exist yet, its nearest parent that exists.
    """
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    return existing, shutil.disk_usage(existing).free


def mounted_as(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type and source of the file system that contains an absolute path; "" if they are not reported."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    type_and_source, depth = "", 0
    for line in lines:
        mount, _, system = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4]))
        # If several file systems are mounted at the same point, the last one hides the earlier ones.
        if (point == path or point in path.parents) and len(point.parts) >= depth:
            type_and_source, depth = " ".join(system.split()[:2]), len(point.parts)
    return type_and_source


def seconds_since_written(path: Path) -> float:
    """Return the seconds since a file was written. Raises BadInput if no file can be written next to it.

    The current time is taken from a new file on the same disk, because a network file system uses its server's clock:
    `time.time()` minus the file's time would compare two clocks.
    """
    probe = path.with_name(f".now-{uuid4().hex}")
    with writing(probe):
        try:
            probe.touch()
            return probe.stat().st_mtime - path.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def system_error(error: OSError) -> str:
    """Return "FILE: REASON" for an OSError, or only the reason if it names no file."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


@contextmanager
def writing(path: Path | str, *, names_file: bool = False) -> Iterator[None]:
    """Raise BadInput if an OSError occurs in the block, which writes `path`.

    The message names `path`. With `names_file`, it names the file of the OSError instead, if the OSError has one.
    """
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
    """Lock a folder, creating it if necessary, and return the descriptor that holds the lock.

    The process that had the lock before may have renamed the folder in the meantime. In that case, our lock is on the
    renamed folder, so a new folder is created and locked if the deadline allows.
    """
    while True:
        if folder.is_symlink():  # nothing may be written through a link
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just renamed the folder
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
    """Return whether a path is free, or a regular file that belongs to this user and has no other hard link."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def is_bucket(url: str) -> bool:
    """Return whether a URL names a bucket and contains no credentials."""
    return re.fullmatch(rf"({'|'.join(BUCKET_SCHEMES)})://[\w.-]+(/[\w./=+-]+)?", url) is not None
