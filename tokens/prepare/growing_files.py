"""Growing token files of one split. They are hidden while they grow, and get their names when the split is complete.

A split is one file, `.partial-train.safetensors`, or it consists of shards of equal length,
`.partial-train-00000.safetensors` and so on. The number of shards is known only at the end. The shards are then renamed
to `train-00000-of-00012.safetensors` and so on, or to `train.safetensors` if there is only one.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np

from common.errors import BadInput
from common.files import naming, sync
from tokens.format.header import HEADER_BYTES, WEIGHT, write_header
from tokens.format.manifest import SPLITS, split_of
from tokens.prepare.plan import COUNTED, GROWING_WORD, LARGEST_ID, PrepareSettings

PARTIAL = ".partial-"
UNITS, LOCK = ".units", ".lock"  # folder of computed units; file that the preparing process locks
COPY_BYTES = 1 << 20
WEIGHTED = "-weighted.safetensors"  # suffix of a file with weights that is made from a growing file


@attrs.frozen
class Shard:
    """A complete file of a split."""

    path: Path  # hidden path
    name: str  # final name
    tokens: int


class GrowingStream:
    """The files of one split, open for appending."""

    def __init__(self, directory: Path, split: str, settings: PrepareSettings, *, to_bucket: bool):
        """With `to_bucket`, full shards are moved to a bucket."""
        self.split = split
        self.length = 0  # tokens
        self._directory = directory
        self._dtype = settings.growing_dtype
        self._settings = settings
        self._shard_tokens = settings.shard_tokens or sys.maxsize
        self._to_bucket = to_bucket
        self._moved = 0  # number of shards, counted from the first, that are in a bucket and no longer on this disk
        self._file: BinaryIO | None = None  # the last file, while it has room

    def resume(self, length: int, log_path: Path) -> None:
        """Continue after the first `length` tokens, which are the tokens in the commit log.

        Files that already have their final names get their hidden names again. Tokens after `length` are deleted.
        Raises BadInput if a file is too short, or if a full shard has the wrong size.
        """
        named_files = [path for path in self._directory.glob("*.safetensors") if split_of(path.name) == self.split]
        # With a template, the named files were made from the growing files, which still exist.
        for path in named_files if self._settings.template is None else ():
            number = re.search(r"-(\d+)-of-", path.name)
            path.replace(self._partial(int(number[1]) if number else 0))
        full, inside = divmod(length, self._shard_tokens)
        self._moved = full if self._to_bucket else 0
        for index in range(self._moved, full + bool(inside)):
            path, end = self._partial(index), self._end(self._shard_tokens if index < full else inside)
            size = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
            if size < end or (index < full and size > end):
                raise BadInput(
                    f"{path}: got {size:,} bytes, wanted {end:,} as {log_path.name} says; pass another --output"
                )
        self.truncate(length)

    def append(self, source: BinaryIO) -> None:
        """Append the tokens of a file, from its current position on."""
        while True:
            room = self._shard_tokens - self.length % self._shard_tokens
            data = source.read(min(COPY_BYTES, room * self._dtype.itemsize))
            if not data:
                return
            path = self._partial(self.length // self._shard_tokens)
            with naming(path):
                if self._file is None:
                    path.unlink(missing_ok=True)  # never write through a link with that name
                    self._file = path.open("x+b")
                    self._file.write(bytes(HEADER_BYTES))
                    sync(self._directory)
                self._file.write(data)
            self.length += len(data) // self._dtype.itemsize
            if self.length % self._shard_tokens == 0:
                self.seal()

    def sync(self) -> None:
        """Wait until all appended tokens are on the disk."""
        if self._file is not None:
            with naming(self._file.name):
                self._file.flush()
                os.fsync(self._file.fileno())

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens from `begin` up to, but not including, `end`. They must have been synced."""
        parts = []
        while begin < end:
            index, inside = divmod(begin, self._shard_tokens)
            count = min(end - begin, self._shard_tokens - inside)
            tokens = np.memmap(self._partial(index), self._dtype, mode="r", offset=HEADER_BYTES)
            parts.append(tokens[inside : inside + count])
            begin += count
        return np.concatenate(parts or [np.empty(0, self._dtype)])

    def truncate(self, length: int) -> None:
        """Cut off the tokens after the first `length`."""
        self.close()
        full, inside = divmod(length, self._shard_tokens)
        kept_paths = {self._partial(index) for index in range(self._moved, full + bool(inside))}
        for path in {*partial_files(self._directory)} - kept_paths:
            if path.name.startswith(f"{PARTIAL}{self.split}"):
                path.unlink()
        if inside:
            self._file = self._partial(full).open("r+b")
            self._file.truncate(self._end(inside))
            self._file.seek(0, os.SEEK_END)
        self.length = length

    def seal(self) -> None:
        """Write the header of the last file. After this, all files are complete except for their names."""
        if self._file is not None:
            with naming(self._file.name):
                write_header(self._file, self._dtype, self.length % self._shard_tokens or self._shard_tokens)
            self.sync()
            self.close()

    def shards(self) -> Iterator[Shard]:
        """Yield the complete files.

        For packed conversations, these are new files that are made from the growing files. The growing files are kept.
        """
        count = -(-self.length // self._shard_tokens)
        digits = max(5, len(str(count)))
        for index in range(count):
            name = self.split if count == 1 else f"{self.split}-{index:0{digits}d}-of-{count:05d}"
            tokens = min(self._shard_tokens, self.length - index * self._shard_tokens)
            path, name = self._partial(index), f"{name}.safetensors"
            if self._settings.context_length is not None:
                path = self._weighted_file(path, tokens, ends=index == count - 1)
                tokens += index == count - 1
            yield Shard(path, name, tokens)

    def full_shards(self) -> list[Path]:
        """Return the full shards on this disk."""
        return [self._partial(index) for index in range(self._moved, self.length // self._shard_tokens)]

    def drop_full_shards(self) -> None:
        """Delete the full shards on this disk, which are now in a bucket."""
        for path in self.full_shards():
            path.unlink()
            self._moved += 1

    @property
    def full(self) -> int:
        """Number of tokens in full shards, on this disk and in a bucket."""
        return self.length - self.length % self._shard_tokens

    def close(self) -> None:
        if self._file is not None:
            with naming(self._file.name):
                self._file.close()
            self._file = None

    def _weighted_file(self, growing: Path, length: int, *, ends: bool) -> Path:
        """Write the tokens and weights of a growing file to a new file next to it. With `ends`, add an end of text."""
        path, settings = growing.with_name(f"{growing.stem}{WEIGHTED}"), self._settings
        words = np.memmap(growing, GROWING_WORD, mode="r", offset=HEADER_BYTES, shape=length)
        path.unlink(missing_ok=True)  # never write through a link with that name
        with naming(path), path.open("xb") as file:
            write_header(file, settings.dtype, length + ends, settings.context_length)
            last = np.array([settings.end_of_text_id] * ends, GROWING_WORD)
            blocks = [*(words[begin : begin + COPY_BYTES] for begin in range(0, length, COPY_BYTES)), last]
            for block in blocks:
                file.write((block & LARGEST_ID).astype(settings.dtype).data)
            for block in blocks:
                file.write((block >> COUNTED).astype(WEIGHT).data)
            file.flush()
            os.fsync(file.fileno())
        return path

    def _end(self, tokens: int) -> int:
        return HEADER_BYTES + tokens * self._dtype.itemsize

    def _partial(self, index: int) -> Path:
        return partial_path(self._directory, self.split, index, self._settings)


def partial_path(directory: Path, split: str, index: int, settings: PrepareSettings) -> Path:
    """Return the hidden path of a file of a split."""
    return directory / f"{PARTIAL}{split}{'' if settings.shard_tokens is None else f'-{index:05d}'}.safetensors"


def partial_files(directory: Path) -> Iterator[Path]:
    """Yield the hidden files of an unfinished preparation."""
    names = re.compile(rf"{re.escape(PARTIAL)}({'|'.join(SPLITS)})(-\d{{5,}})?(-weighted)?\.safetensors")
    return (path for path in directory.glob(f"{PARTIAL}*.safetensors") if names.fullmatch(path.name))
