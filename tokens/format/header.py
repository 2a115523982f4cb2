"""Safetensors header of a token file: a 1-D tensor `tokens`, uint16 or uint32, and of conversations its `weights`.

`weights` follows `tokens`, one uint8 each: 1 where the token counts as a target, else 0. The metadata then has the
`context_length` T of the rows into which the conversations are packed: row r is tokens r T to (r + 1) T.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from common.errors import BadInput, refusing
from common.files import naming
from common.json_files import FILE_BYTES, open_regular, parse_json
from common.text import quoted

HEADER_BYTES = 4096  # of the files we write: room for any token count, and the data starts on a page

WEIGHT = np.dtype("u1")  # of a token

_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}  # safetensors' names


@attrs.frozen
class TokenFile:
    """One token file: its type, and the position of its tokens."""

    path: Path
    dtype: np.dtype
    offset_bytes: int
    length: int  # tokens
    context_length: int | None = None  # tokens of a row, where weights follow; None where all tokens count alike


def read_header(path: Path) -> TokenFile:
    """Return the token file behind a path. Raises BadInput unless it holds exactly such tensors."""
    with readable_tokens(path), open_regular(path) as file:
        size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, FILE_BYTES):
            raise BadInput(f"{path}: not a safetensors file, or cut short at {size} bytes")
        data = file.read(length)
    with refusing(f"{path}: not a safetensors file: its header"):
        header = parse_json(data)
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if sorted(tensors) not in (["tokens"], ["tokens", "weights"]):
        got = ", ".join([*tensors][:5]) + (f" and {len(tensors) - 5:,} more" if len(tensors) > 5 else "")
        raise BadInput(f"{path}: got tensors {got or 'none'}, wanted one named 'tokens', at most 'weights' beside it")
    match tensors["tokens"]:
        case {"dtype": "U16" | "U32" as kind, "shape": [int(count)], "data_offsets": [0, int(tokens_end)]}:
            dtype = _DTYPES[kind]
        case tensor:
            raise BadInput(f"{path}: no tokens: got {quoted(tensor)}, wanted U16 or U32, one dimension, first in it")
    weighted, start, end = "weights" in tensors, 8 + length, count * dtype.itemsize
    data_end = end + count * WEIGHT.itemsize * weighted
    if weighted and tensors["weights"] != {"dtype": "U8", "shape": [count], "data_offsets": [end, data_end]}:
        raise BadInput(f"{path}: weights: got {quoted(tensors['weights'])}, wanted U8, one for each token, after them")
    if tokens_end != end or start + data_end != size:
        raise BadInput(f"{path}: cut short or damaged: got {size} bytes, wanted {start + data_end}; prepare it again")
    if not weighted:
        return TokenFile(path, dtype, start, count)
    return TokenFile(path, dtype, start, count, _row_length(path, header.get("__metadata__")))


def write_header(file: BinaryIO, dtype: np.dtype, length: int, context_length: int | None = None) -> None:
    """Write the first HEADER_BYTES of a file of `length` tokens; `context_length`: of the rows of one with weights."""
    names, end = {value: name for name, value in _DTYPES.items()}, length * dtype.itemsize
    header: dict[str, Any] = {"tokens": {"dtype": names[dtype], "shape": [length], "data_offsets": [0, end]}}
    if context_length is not None:
        header["weights"] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length * WEIGHT.itemsize]}
        header["__metadata__"] = {"context_length": str(context_length)}
    data = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
    file.seek(0)
    file.write(struct.pack("<Q", len(data)) + data)


def write_weighted(path: Path, tokens: np.ndarray, weights: np.ndarray, context_length: int) -> None:
    """Write a token file with weights: 1-D arrays of one length, ids of the file's type and 0 or 1 for each."""
    assert tokens.shape == weights.shape, (tokens.shape, weights.shape)
    with naming(path), path.open("wb") as file:
        write_header(file, tokens.dtype, len(tokens), context_length)
        file.write(tokens.tobytes() + weights.astype(WEIGHT).tobytes())


@contextmanager
def readable_tokens(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which reads `path`, into BadInput; not a missing file: it may be named just now."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where = error.filename or path
        advice = "check name and permissions" if error.errno else "move it away"
        raise BadInput(f"{where}: cannot be read: {error.strerror or error}; {advice}") from error


def _row_length(path: Path, metadata: object) -> int:
    """Return the context length in the metadata of a file with weights. Raises BadInput without one."""
    match metadata:
        case {"context_length": str(text)} if text.isascii() and text.isdecimal() and int(text[:9]) > 0:
            return int(text[:9])
        case _:
            raise BadInput(f"{path}: has weights, but no context_length in its metadata; prepare it again")
