"""The on-disk format of tokens, and the only module that knows it.

`<split>.safetensors` holds one 1-D tensor `tokens`, uint16 or uint32; a long stream may be split into
`<split>-00000-of-00020.safetensors` and is read as one.
"""

import bisect
import itertools
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from common.errors import QUOTED_CHARACTERS, BadInput, quoted
from common.json_files import FILE_BYTES, parse_json

HEADER_BYTES = 4096  # of the files we write: room for any token count, and the data starts on a page
SCAN_TOKENS = 1 << 24  # looked at in one go when ids are checked
OPEN_FILES = 256  # of a stream at a time; a process may have 1,024

Version = tuple[int, int]  # of a file: its size in bytes, and when it was last changed, in ns

_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}  # safetensors' names


@attrs.frozen
class TokenFile:
    """One file of a stream: where its tokens lie."""

    path: Path
    dtype: np.dtype
    offset_bytes: int
    length: int  # tokens


class TokenStream:
    """The tokens of one split, read when they are asked for: in the system's cache a machine holds one copy.

    Not memory-mapped: a read beyond the end of a mapped file that was cut short ends the process (SIGBUS).
    """

    def __init__(self, files: list[TokenFile]):
        self.files = files
        self.length = sum(file.length for file in files)  # tokens
        self.dtype = np.result_type(*{file.dtype for file in files})
        self._starts = [0, *itertools.accumulate(file.length for file in files)]
        self._descriptor = lru_cache(OPEN_FILES)(lambda number: _Descriptor(_open(files[number].path)))
        self._versions = {file.path: version_of(file.path) for file in files}

    @property
    def versions(self) -> dict[Path, Version | None]:
        """Size and time of files that nobody should write any more, as they were when the stream was opened."""
        return self._versions

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start .. start + count, 1-D. Raises BadInput for a file that cannot be read any more."""
        tokens = np.empty(count, self.dtype)
        self.read_into(tokens, start)
        return tokens

    def read_into(self, tokens: np.ndarray, start: int) -> None:
        """Fill a contiguous 1-D array of the stream's type with what begins at `start`. Raises BadInput as `read`."""
        assert start >= 0 and start + len(tokens) <= self.length, (start, len(tokens), self.length)
        while len(tokens):
            number = bisect.bisect_right(self._starts, start) - 1
            file, offset = self.files[number], start - self._starts[number]
            part = tokens[: file.length - offset] if len(tokens) > file.length - offset else tokens
            descriptor, place = self._descriptor(number), file.offset_bytes + offset * self.dtype.itemsize
            try:
                # Returns bytes; Linux reads at most 2 GiB at once.
                count = os.preadv(descriptor.number, (part,), place)  # type: ignore[arg-type]  # an array is a buffer
            except OSError as error:
                raise _unreadable(file.path, error.strerror) from error
            if count < self.dtype.itemsize:
                raise _unreadable(file.path, "it was cut short")
            read = count // self.dtype.itemsize
            if read == len(tokens):  # nearly always
                return
            tokens, start = tokens[read:], start + read

    def locate(self, position: int) -> str:
        """Return "FILE: token OFFSET" of a position in the stream, for error messages."""
        first = bisect.bisect_right(self._starts, position) - 1
        return f"{self.files[first].path}: token {position - self._starts[first]}"

    def check_ids(self, start: int, count: int, vocabulary_size: int) -> None:
        """Raise BadInput naming file and offset of the first id in the range that is not below the vocabulary size."""
        for at in range(start, start + count, SCAN_TOKENS):
            ids = self.read(at, min(SCAN_TOKENS, start + count - at))
            if ids.max() >= vocabulary_size:
                bad = int(np.argmax(ids >= vocabulary_size))
                raise BadInput(
                    f"{self.locate(at + bad)}: got id {ids[bad]}, wanted less than vocab_size {vocabulary_size}; "
                    "these tokens were made with another tokenizer, or the file is damaged"
                )


class _Descriptor:
    """An open file; closed when nothing refers to it any more."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def open_split(directory: Path, split: str) -> TokenStream:
    """Open `<split>.safetensors` or its shards. Raises BadInput for missing, damaged or foreign files."""
    whole = directory / f"{split}.safetensors"
    with readable_tokens(directory):
        is_whole = whole.is_file()
        shards = sorted(directory.glob(f"{split}-[0-9]*-of-[0-9]*.safetensors"))
    if is_whole and shards:
        raise BadInput(f"{directory}: holds both {whole.name} and {shards[0].name}; keep one of them")
    if is_whole:
        return TokenStream([read_header(whole)])
    if not shards:
        raise BadInput(f"{directory}: no {whole.name}{_instead(directory, split)}")
    _check_shards(directory, split, shards)
    stream = TokenStream([read_header(shard) for shard in shards])
    for file in stream.files:
        if file.dtype != stream.files[0].dtype:
            raise BadInput(f"{file.path}: got {file.dtype}, wanted {stream.files[0].dtype} as in {shards[0].name}")
    return stream


def read_header(path: Path) -> TokenFile:
    """Return where the tokens of a safetensors file lie. Raises BadInput unless it is exactly one such tensor."""
    size, header, length = _header(path)
    names = [name for name in header if name != "__metadata__"]
    if names != ["tokens"]:
        got = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
        raise BadInput(f"{path}: got tensors {got or 'none'}, wanted one named 'tokens'")
    match header["tokens"]:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise BadInput(f"{path}: not a safetensors file: its header does not describe its tokens")
    if kind not in _DTYPES or len(shape) != 1 or not isinstance(shape[0], int):
        raise BadInput(
            f"{path}: got dtype {kind[:QUOTED_CHARACTERS]} and shape {quoted(shape)}, wanted U16 or U32 and one "
            "dimension"
        )
    dtype, count = _DTYPES[kind], shape[0]
    if begin != 0 or end != count * dtype.itemsize or 8 + length + end != size:
        raise BadInput(
            f"{path}: cut short or damaged: got {size} bytes, wanted {8 + length + count * dtype.itemsize} "
            f"for its {count} tokens; prepare or download it again"
        )
    return TokenFile(path, dtype, 8 + length, count)


def version_of(path: Path) -> Version | None:
    """Return size and time of the last change, None for a file that is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    """Write the first HEADER_BYTES of a token file that holds `length` tokens; the data follows them."""
    names = {value: name for name, value in _DTYPES.items()}
    tensor = {"dtype": names[dtype], "shape": [length], "data_offsets": [0, length * dtype.itemsize]}
    header = json.dumps({"tokens": tensor}).encode().ljust(HEADER_BYTES - 8)
    file.seek(0)
    file.write(struct.pack("<Q", len(header)) + header)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def _unreadable(path: Path, reason: str | None) -> BadInput:
    return BadInput(f"{path}: cannot be read any more: {reason}; bring it back, or prepare it again", alone=True)


@contextmanager
def readable_tokens(path: Path) -> Iterator[None]:
    """Raise BadInput naming the file for what the system says when it is read.

    A file that is gone passes: while tokens are written, it was given its final name just now.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where = error.filename or path
        raise BadInput(f"{where}: cannot be read: {error.strerror or error}; check name and permissions") from error


def _header(path: Path) -> tuple[int, dict[str, Any], int]:
    """Return a safetensors file's size, its header, and the header's length, both in bytes."""
    with readable_tokens(path):
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise BadInput(f"{path}: no regular file; move it away")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, FILE_BYTES):
                raise BadInput(f"{path}: not a safetensors file, or cut short at {size} bytes")
            data = file.read(length)
    try:
        return size, parse_json(data), length
    except ValueError as error:
        raise BadInput(f"{path}: not a safetensors file: its header: {error}") from error


def _check_shards(directory: Path, split: str, shards: list[Path]) -> None:
    """Raise BadInput unless these are all shards of one set. Takes no longer than there are shards."""
    names = {path.name for path in shards}
    total = re.fullmatch(rf"{split}-\d+-of-(\d+)", shards[0].stem)
    count = total[1] if total else "0"
    numbers = range(min(int(count), len(shards) + 1))  # one of so many is missing, if any is
    wanted = [f"{split}-{number:0{len(count)}d}-of-{count}.safetensors" for number in numbers]
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise BadInput(
            f"{directory}: shards of {split} do not add up: missing {missing}; prepare or download them again"
        )
    other = sorted(names.difference(wanted))
    if other:
        raise BadInput(f"{directory}: shards of {split} do not add up: {other[0]} is of another set; keep one set")


def _instead(directory: Path, split: str) -> str:
    """Return what to do where there is no token file of a split, for an error."""
    name = {"train": "train.bin", "validation": "val.bin"}.get(split, "")
    if not (directory / name).is_file():
        return "; prepare_data.py writes one, or pass --token-files DIR"
    convert = (
        "import numpy, safetensors.numpy as s; "
        f"s.save_file({{'tokens': numpy.fromfile('{name}', 'uint16')}}, '{split}.safetensors')"
    )
    return f', but {name}: a file of nanoGPT is not read; convert it in that folder by python3 -c "{convert}"'
