"""Token stream: the ids of one split, read from token files by position.

A split is the file `<split>.safetensors`, or shards such as `<split>-00000-of-00020.safetensors` that are read as one
stream. A folder without such files may contain token files of another program: see tokens/format/foreign_files.py.
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

OPEN_FILES = 256  # maximum number of a stream's files that are open at the same time; a process may open 1,024
SCAN_TOKENS = 1 << 24  # number of tokens that are read at a time to check their ids

Version = tuple[int, int]  # size of a file in bytes, and the time of its last change in ns


class TokenStream:
    """The tokens of one split, read on demand. All processes share one copy, in the operating system's page cache.

    The files are not memory-mapped: if a mapped file is truncated, reading after its new end kills the process
    (SIGBUS).
    """

    def __init__(self, files: list[TokenFile]):
        self.files = files
        self.length = sum(file.length for file in files)  # tokens
        self.dtype = np.result_type(*{file.dtype for file in files})
        self._starts = [0, *itertools.accumulate(file.length for file in files)]
        self._descriptor = lru_cache(OPEN_FILES)(lambda number: _Descriptor(_open(files[number].path)))
        # Version of each file when the stream was opened, to notice later changes; empty if the files still grow.
        self.versions: dict[Path, Version | None] = {file.path: version_of(file.path) for file in files}

    @property
    def weighted(self) -> bool:
        """True if the files store a loss weight for each token, as files of conversations do.

        The weight of a token is used when that token is the target.
        """
        return self.context_length is not None

    @property
    def context_length(self) -> int | None:
        """Tokens per row of conversations; None if the files have no weights."""
        return next((file.context_length for file in self.files), None)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the `count` tokens from `start` on as a 1-D array. Raises BadInput if a file is no longer readable."""
        tokens = np.empty(count, self.dtype)
        self.read_into(tokens, start)
        return tokens

    def read_weights_into(self, weights: np.ndarray, start: int) -> None:
        """Fill a contiguous 1-D uint8 array with the weights of the tokens from `start` on.

        If the files have no weights, all weights are 1.
        """
        if self.weighted:
            self.read_into(weights, start, weights=True)
        else:
            weights.fill(1)

    def read_into(self, values: np.ndarray, start: int, *, weights: bool = False) -> None:
        """Fill a contiguous 1-D array of the stream's dtype with the tokens from `start` on.

        With `weights`, fill a uint8 array with the weights of these tokens instead.
        """
        assert start >= 0 and start + len(values) <= self.length, (start, len(values), self.length)
        size = WEIGHT.itemsize if weights else self.dtype.itemsize
        while len(values):
            number = bisect.bisect_right(self._starts, start) - 1
            file, offset = self.files[number], start - self._starts[number]
            part = values[: file.length - offset] if len(values) > file.length - offset else values
            first = file.offset_bytes + weights * file.length * file.dtype.itemsize
            descriptor, position = self._descriptor(number), first + offset * size
            try:
                # This returns the number of bytes that were read; Linux reads at most 2 GiB in one call.
                count = os.preadv(descriptor.number, (part,), position)  # type: ignore[arg-type]  # an array is a buffer
            except OSError as error:
                raise _read_error(file.path, error.strerror) from error
            if count < size:
                raise _read_error(file.path, "it was truncated")
            read = count // size
            if read == len(values):  # nearly always
                return
            values, start = values[read:], start + read

    def check_ids(self, start: int, count: int, vocabulary_size: int) -> None:
        """Raise BadInput if a range contains an id that is not below the vocabulary size.

        The error names the position of the first such id.
        """
        for at in range(start, start + count, SCAN_TOKENS):
            ids = self.read(at, min(SCAN_TOKENS, start + count - at))
            if ids.max() >= vocabulary_size:
                bad = int(np.argmax(ids >= vocabulary_size))
                raise BadInput(self.bad_id(at + bad, ids[bad], vocabulary_size))

    def file_at(self, position: int) -> tuple[Path, int]:
        """Return the file that contains a token, and the token's position in that file."""
        number = bisect.bisect_right(self._starts, position) - 1
        return self.files[number].path, position - self._starts[number]

    def bad_id(self, position: int, token: int, vocabulary_size: int) -> str:
        """Return a message that names the file and offset of an id that is not below the vocabulary size."""
        path, offset = self.file_at(position)
        problem = "these tokens were made with another tokenizer, or the file is damaged"
        return f"{path}: token {offset}: got id {token}, wanted less than vocab_size {vocabulary_size}; {problem}"


def open_split(directory: Path, split: str) -> TokenStream:
    """Open a split: `<split>.safetensors`, or its shards, or else files that another program wrote.

    Raises BadInput if there are no such files, or if they are damaged or contradict each other.
    """
    single_file = directory / f"{split}.safetensors"
    with readable_tokens(directory):
        is_single_file = single_file.is_file()
        shards = sorted(directory.glob(f"{split}-[0-9]*-of-[0-9]*.safetensors"))
    if is_single_file and shards:
        raise BadInput(f"{directory}: contains both {single_file.name} and {shards[0].name}; keep only one of them")
    if is_single_file or shards:
        _refuse_second_format(directory, split, single_file if is_single_file else shards[0])
    if is_single_file:
        return TokenStream([read_header(single_file)])
    if not shards:
        return TokenStream(_open_foreign(directory, split))
    _check_shards(directory, split, shards)
    stream = TokenStream([read_header(shard) for shard in shards])
    _check_same_type(stream.files)
    return stream


def version_of(path: Path) -> Version | None:
    """Return the version of a file, or None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class _Descriptor:
    """An open file, which is closed when nothing refers to this object any more."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _read_error(path, error.strerror) from error


def _read_error(path: Path, reason: str | None) -> BadInput:
    return BadInput(f"{path}: can no longer be read: {reason}; restore it or prepare it again", alone=True)


def _check_shards(directory: Path, split: str, shards: list[Path]) -> None:
    """Raise BadInput unless the shards are one complete set. The time is linear in the number of existing shards."""
    names = {path.name for path in shards}
    total = re.fullmatch(rf"{split}-\d+-of-(\d+)", shards[0].stem)
    count = total[1] if total else "0"
    numbers = range(min(int(count), len(shards) + 1))  # a missing shard must be among the first len(shards) + 1
    expected_names = [f"{split}-{number:0{len(count)}d}-of-{count}.safetensors" for number in numbers]
    missing = next((name for name in expected_names if name not in names), None)
    if missing is not None:
        raise BadInput(f"{directory}: incomplete shards of {split}: missing {missing}; prepare or download them again")
    unexpected_names = sorted(names.difference(expected_names))
    if unexpected_names:
        raise BadInput(
            f"{directory}: contains several sets of shards of {split}: {unexpected_names[0]} is not from the same set "
            f"as {expected_names[0]}; keep only one set"
        )


def _refuse_second_format(directory: Path, split: str, ours: Path) -> None:
    """Raise BadInput if files of another program contain the same split as our file `ours`."""
    names = sorted(path.name for suffix in ("bin", "npy") for path in directory.glob(f"*.{suffix}"))
    if not names:
        return
    from tokens.format.foreign_files import parse_name

    for parsed in map(parse_name, names):
        if parsed is not None and parsed.split == split:
            raise BadInput(f"{directory}: contains both {ours.name} and {parsed.name}; keep files of one format")


def _open_foreign(directory: Path, split: str) -> list[TokenFile]:
    """Return the files of a split that another program wrote.

    Raises BadInput if the folder has no such files, or if it mixes formats.
    """
    from tokens.format.foreign_files import foreign_names, read_foreign_header

    with readable_tokens(directory):
        names = [path.name for path in directory.glob("*")]
    by_split = foreign_names(directory, names)
    if split not in by_split:
        advice = "prepare some with prepare_data.py, or name another token directory"
        raise BadInput(f"{directory}: no {split} tokens (.safetensors, .bin, .npy); {advice}")
    ours = next((name for name in sorted(names) if name.endswith(".safetensors")), None)
    if ours is not None:
        raise BadInput(f"{directory}: contains both {ours} and {by_split[split][0]}; keep files of one format")
    files = {name: read_foreign_header(directory / name) for names in by_split.values() for name in names}
    _check_same_type(list(files.values()))
    return [files[name] for name in by_split[split]]


def _check_same_type(files: list[TokenFile]) -> None:
    """Raise BadInput unless all files agree in the type of ids, the length of rows, and whether they have a header."""
    for file in files:
        for got, expected in zip(_kinds(file), _kinds(files[0]), strict=True):
            if got != expected:
                raise BadInput(f"{file.path}: got {got}, wanted {expected} as in {files[0].path.name}; keep one format")


def _kinds(file: TokenFile) -> tuple[str, str, str]:
    header = "no header" if file.offset_bytes == 0 else "a header"
    rows = "no weights" if file.context_length is None else f"rows of {file.context_length} weights"
    return str(file.dtype), rows, header
