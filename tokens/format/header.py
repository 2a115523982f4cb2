"""Safetensors header of a token file: one 1-D tensor `tokens`, uint16 or uint32."""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from common.errors import QUOTED_CHARACTERS, BadInput, quoted, refusing
from common.json_files import FILE_BYTES, parse_json

HEADER_BYTES = 4096  # of the files we write: room for any token count, and the data starts on a page

_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}  # safetensors' names


@attrs.frozen
class TokenFile:
    """One token file: its type, and the position of its tokens."""

    path: Path
    dtype: np.dtype
    offset_bytes: int
    length: int  # tokens


def read_header(path: Path) -> TokenFile:
    """Return the token file behind a path. Raises BadInput unless it holds exactly one such tensor."""
    with regular_file(path) as (file, size):
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, FILE_BYTES):
            raise BadInput(f"{path}: not a safetensors file, or cut short at {size} bytes")
        data = file.read(length)
    with refusing(f"{path}: not a safetensors file: its header"):
        header = parse_json(data)
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


def write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    """Write the first HEADER_BYTES of a token file that holds `length` tokens; the data follows them."""
    names = {value: name for name, value in _DTYPES.items()}
    tensor = {"dtype": names[dtype], "shape": [length], "data_offsets": [0, length * dtype.itemsize]}
    header = json.dumps({"tokens": tensor}).encode().ljust(HEADER_BYTES - 8)
    file.seek(0)
    file.write(struct.pack("<Q", len(header)) + header)


@contextmanager
def readable_tokens(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which reads `path`, into BadInput; but not that a file is missing.

    A file that is being prepared gets its final name at any moment: then the caller looks for that.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where = error.filename or path
        raise BadInput(f"{where}: cannot be read: {error.strerror or error}; check name and permissions") from error


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file to read; yield it and its size in bytes. Raises BadInput as `readable_tokens`, and for a pipe."""
    with readable_tokens(path):
        if path.exists() and not path.is_file():  # opening a pipe would wait forever
            raise BadInput(f"{path}: no regular file; move it away")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
