"""Durable and atomic file writes, hashes of files, and errors that say why a file cannot be written."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import BadInput

BLOCK_BYTES = 1 << 22


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Give a file another content: all of it, or on an error none. `durable`: wait until it is on the disk.

    A link at the path is replaced, and nothing is written through a link at the partial file's name.
    """
    partial = path.with_name(f".partial-{path.name}")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of the file and its folder"),
    errno.EROFS: "this file system is read-only: choose another place",
    errno.EISDIR: "a folder has its name: move that away",
    errno.ENOTDIR: "a file stands where a folder is wanted: move that away",
    errno.ENXIO: "it is a pipe or a device: move that away",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "its folder does not exist: create it",
}


def write_problem(path: Path | str, error: OSError) -> str:
    """Return why a file cannot be written, and what to do about it."""
    return f"{path}: cannot be written: {error.strerror or error}; {_ADVICE.get(error.errno or 0, 'fix this')}"


def write_error(path: Path | str, error: OSError) -> BadInput:
    """Return the error to raise where a file cannot be written."""
    return BadInput(f"{write_problem(path, error)}, then rerun the same command")


def is_folder(path: Path) -> bool:
    """Tell whether there is a folder. False, too, for a name that no file can have, such as one that is too long."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises for it


def system_error(error: OSError) -> str:
    """Return an error of the system as part of a line: the file, where one is known, and the reason."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into BadInput."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return sha256_of(file)


def sha256_of(stream: BinaryIO) -> str:
    """Return the sha256 of what a stream still holds, in hexadecimal."""
    digest = hashlib.sha256()
    while block := stream.read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
