"""Writing files so that they are on the disk when a function returns, and knowing them again."""

import hashlib
import os
from pathlib import Path

BLOCK_BYTES = 1 << 22


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Give a file another content: all of it, or on an error none. `durable`: wait until it is on the disk."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
