"""Token stream: the ids of one split, read from token files by position.

A split is `<split>.safetensors`, or shards `<split>-00000-of-00020.safetensors` that are read as one stream. A folder
without such files may hold those of another program: tokens/format/foreign_files.py.
"""

import bisect
import itertools
import os
import re
from functools import lru_cache
from pathlib import Path

import numpy as np

from common.errors import BadInput
from tokens.format.header import WEIGHT, TokenFile, read_header, readable_tokens

OPEN_FILES = 256  # of a stream at a time; a process may have 1,024
SCAN_TOKENS = 1 << 24  # read at a time when ids are checked

Version = tuple[int, int]  # of a file: size in bytes, time of the last change in ns


class TokenStream:
    """The tokens of one split, read on demand: a machine holds one copy, in the system's page cache.

    Not memory-mapped: a read beyond the end of a mapped file that was cut short ends the process (SIGBUS).
    """

    def __init__(self, files: list[TokenFile]):
        self.files = files
        self.length = sum(file.length for file in files)  # tokens
        self.dtype = np.result_type(*{file.dtype for file in files})
        self._starts = [0, *itertools.accumulate(file.length for file in files)]
        self._descriptor = lru_cache(OPEN_FILES)(lambda number: _Descriptor(_open(files[number].path)))
        # of the files when the stream was opened, to notice a change; none for files that still grow
        self.versions: dict[Path, Version | None] = {file.path: version_of(file.path) for file in files}

    @property
    def weighted(self) -> bool:
        """True if tokens count differently as targets: conversations, in rows of `context_length` tokens."""
        return self.context_length is not None

    @property
    def context_length(self) -> int | None:
        """Tokens of a row, None where there are no weights."""
        return next((file.context_length for file in self.files), None)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start .. start + count, 1-D. Raises BadInput for a file that cannot be read any more."""
        tokens = np.empty(count, self.dtype)
        self.read_into(tokens, start)
        return tokens

    def read_weights_into(self, weights: np.ndarray, start: int) -> None:
        """Fill a contiguous 1-D uint8 array with the weights of the tokens from `start` on, 1 where there are none."""
        if self.weighted:
            self.read_into(weights, start, weights=True)
        else:
            weights.fill(1)

    def read_into(self, values: np.ndarray, start: int, *, weights: bool = False) -> None:
        """Fill a contiguous 1-D array with the tokens from `start` on, in their dtype, or uint8 `weights` of them."""
        assert start >= 0 and start + len(values) <= self.length, (start, len(values), self.length)
        size = WEIGHT.itemsize if weights else self.dtype.itemsize
        while len(values):
            number = bisect.bisect_right(self._starts, start) - 1
            file, offset = self.files[number], start - self._starts[number]
            part = values[: file.length - offset] if len(values) > file.length - offset else values
            first = file.offset_bytes + weights * file.length * file.dtype.itemsize
            descriptor, place = self._descriptor(number), first + offset * size
            try:
                # Returns bytes; Linux reads at most 2 GiB at once.
                count = os.preadv(descriptor.number, (part,), place)  # type: ignore[arg-type]  # an array is a buffer
            except OSError as error:
                raise _unreadable(file.path, error.strerror) from error
            if count < size:
                raise _unreadable(file.path, "it was cut short")
            read = count // size
            if read == len(values):  # nearly always
                return
            values, start = values[read:], start + read

    def check_ids(self, start: int, count: int, vocabulary_size: int) -> None:
        """Raise BadInput naming file and offset of the first id in the range that is not below the vocabulary size."""
        for at in range(start, start + count, SCAN_TOKENS):
            ids = self.read(at, min(SCAN_TOKENS, start + count - at))
            if ids.max() >= vocabulary_size:
                bad = int(np.argmax(ids >= vocabulary_size))
                raise BadInput(self.bad_id(at + bad, ids[bad], vocabulary_size))

    def file_at(self, position: int) -> tuple[Path, int]:
        """Return the file that holds a token, and the token's position in it."""
        number = bisect.bisect_right(self._starts, position) - 1
        return self.files[number].path, position - self._starts[number]

    def bad_id(self, position: int, token: int, vocabulary_size: int) -> str:
        """Return the problem of an id that is not below the vocabulary size, with its file and offset."""
        path, offset = self.file_at(position)
        problem = "these tokens were made with another tokenizer, or the file is damaged"
        return f"{path}: token {offset}: got id {token}, wanted less than vocab_size {vocabulary_size}; {problem}"


def open_split(directory: Path, split: str) -> TokenStream:
    """Open `<split>.safetensors`, its shards, or else another program's files. Raises BadInput without intact ones."""
    whole = directory / f"{split}.safetensors"
    with readable_tokens(directory):
        is_whole = whole.is_file()
        shards = sorted(directory.glob(f"{split}-[0-9]*-of-[0-9]*.safetensors"))
    if is_whole and shards:
        raise BadInput(f"{directory}: holds both {whole.name} and {shards[0].name}; keep one of them")
    if is_whole or shards:
        _refuse_second_format(directory, split, whole if is_whole else shards[0])
    if is_whole:
        return TokenStream([read_header(whole)])
    if not shards:
        return TokenStream(_open_foreign(directory, split))
    _check_shards(directory, split, shards)
    stream = TokenStream([read_header(shard) for shard in shards])
    _check_same_type(stream.files)
    return stream


def version_of(path: Path) -> Version | None:
    """Return the version of a file, None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


class _Descriptor:
    """An open file; closed when nothing refers to it any more."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def _unreadable(path: Path, reason: str | None) -> BadInput:
    return BadInput(f"{path}: cannot be read any more: {reason}; bring it back, or prepare it again", alone=True)


def _check_shards(directory: Path, split: str, shards: list[Path]) -> None:
    """Raise BadInput unless these are all shards of one set, in time linear in the shards that are there."""
    names = {path.name for path in shards}
    total = re.fullmatch(rf"{split}-\d+-of-(\d+)", shards[0].stem)
    count = total[1] if total else "0"
    numbers = range(min(int(count), len(shards) + 1))  # one of so many is missing, if any is
    wanted = [f"{split}-{number:0{len(count)}d}-of-{count}.safetensors" for number in numbers]
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise BadInput(f"{directory}: incomplete shards of {split}: missing {missing}; prepare or download them again")
    other = sorted(names.difference(wanted))
    if other:
        raise BadInput(f"{directory}: shards of several sets of {split}: {other[0]} is of another set; keep one set")


def _refuse_second_format(directory: Path, split: str, ours: Path) -> None:
    """Raise BadInput where files of another program hold the same split."""
    names = sorted(path.name for suffix in ("bin", "npy") for path in directory.glob(f"*.{suffix}"))
    if not names:
        return
    from tokens.format.foreign_files import parse_name

    for parsed in map(parse_name, names):
        if parsed is not None and parsed.split == split:
            raise BadInput(f"{directory}: holds both {ours.name} and {parsed.name}; keep files of one format")


def _open_foreign(directory: Path, split: str) -> list[TokenFile]:
    """Return another program's files of a split. Raises BadInput where the folder has none, or mixes formats."""
    from tokens.format.foreign_files import foreign_names, read_foreign_header

    with readable_tokens(directory):
        names = [path.name for path in directory.glob("*")]
    by_split = foreign_names(directory, names)
    if split not in by_split:
        raise BadInput(f"{directory}: no {split} tokens (.safetensors, .bin, .npy); prepare some or pass --token-files")
    ours = next((name for name in sorted(names) if name.endswith(".safetensors")), None)
    if ours is not None:
        raise BadInput(f"{directory}: holds both {ours} and {by_split[split][0]}; keep files of one format")
    files = {name: read_foreign_header(directory / name) for names in by_split.values() for name in names}
    _check_same_type(list(files.values()))
    return [files[name] for name in by_split[split]]


def _check_same_type(files: list[TokenFile]) -> None:
    """Raise BadInput unless all files hold ids of one type, weights of one context length, and a header, or none."""
    for file in files:
        for got, wanted in zip(_kinds(file), _kinds(files[0]), strict=True):
            if got != wanted:
                raise BadInput(f"{file.path}: got {got}, wanted {wanted} as in {files[0].path.name}; keep one format")


def _kinds(file: TokenFile) -> tuple[str, str, str]:
    header = "no header" if file.offset_bytes == 0 else "a header"
    return str(file.dtype), f"rows of {file.context_length or 'no'} weights", header
