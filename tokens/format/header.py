"""Safetensors header of a token file.

A token file contains a 1-D tensor `tokens` of uint16 or uint32. A file of conversations also contains `weights`, one
uint8 for each token, directly after `tokens`: 1 if the token counts as a target, and 0 if not. The metadata of such a
file gives `context_length`, the length T of the rows into which the conversations are packed: row r begins
at token r * T.
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

# Length of the header in files that we write. It has room for any token count, and the tokens start on a page boundary.
HEADER_BYTES = 4096

WEIGHT = np.dtype("u1")  # type of a token's weight

_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}  # safetensors' names


@attrs.frozen
class TokenFile:
    """One token file: the type of its tokens, and their place in the file."""

    path: Path
    dtype: np.dtype
    offset_bytes: int
    length: int  # tokens
    context_length: int | None = None  # tokens per row in a file with weights; None in a file without weights


def read_header(path: Path) -> TokenFile:
    """Read the header of a token file. Raises BadInput unless the file has exactly the tensors of a token file."""
    with readable_tokens(path), open_regular(path) as file:
        size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, FILE_BYTES):
            raise BadInput(f"{path}: not a safetensors file, or truncated at {size} bytes")
        data = file.read(length)
    with refusing(f"{path}: not a safetensors file: its header"):
        header = parse_json(data)
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if sorted(tensors) not in (["tokens"], ["tokens", "weights"]):
        got = ", ".join([*tensors][:5]) + (f" and {len(tensors) - 5:,} more" if len(tensors) > 5 else "")
        raise BadInput(f"{path}: got tensors {got or 'none'}, wanted only 'tokens' and optionally 'weights'")
    match tensors["tokens"]:
        case {"dtype": "U16" | "U32" as kind, "shape": [int(count)], "data_offsets": [0, int(tokens_end)]}:
            dtype = _DTYPES[kind]
        case tensor:
            raise BadInput(
                f"{path}: its tensor 'tokens' cannot be read: got {quoted(tensor)}, "
                "wanted one dimension of U16 or U32 at the start of the data"
            )
    weighted, start, end = "weights" in tensors, 8 + length, count * dtype.itemsize
    data_end = end + count * WEIGHT.itemsize * weighted
    if weighted and tensors["weights"] != {"dtype": "U8", "shape": [count], "data_offsets": [end, data_end]}:
        raise BadInput(
            f"{path}: its tensor 'weights' cannot be read: got {quoted(tensors['weights'])}, "
            "wanted one U8 for each token, directly after the tokens"
        )
    if tokens_end != end or start + data_end != size:
        raise BadInput(f"{path}: truncated or damaged: got {size} bytes, wanted {start + data_end}; prepare it again")
    if not weighted:
        return TokenFile(path, dtype, start, count)
    return TokenFile(path, dtype, start, count, _row_length(path, header.get("__metadata__")))


def write_header(file: BinaryIO, dtype: np.dtype, length: int, context_length: int | None = None) -> None:
    """Write the header, the first HEADER_BYTES of a token file with `length` tokens.

    `context_length` is the row length of a file with weights, or None for a file without weights.
    """
    names, end = {value: name for name, value in _DTYPES.items()}, length * dtype.itemsize
    header: dict[str, Any] = {"tokens": {"dtype": names[dtype], "shape": [length], "data_offsets": [0, end]}}
    if context_length is not None:
        header["weights"] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length * WEIGHT.itemsize]}
        header["__metadata__"] = {"context_length": str(context_length)}
    data = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
    file.seek(0)
    file.write(struct.pack("<Q", len(data)) + data)


def write_weighted(path: Path, tokens: np.ndarray, weights: np.ndarray, context_length: int) -> None:
    """Write a token file with weights.

    `tokens` and `weights` are 1-D arrays of the same length: ids in the file's type, and the weight (0 or 1) of each
    id.
    """
    assert tokens.shape == weights.shape, (tokens.shape, weights.shape)
    with naming(path), path.open("wb") as file:
        write_header(file, tokens.dtype, len(tokens), context_length)
        file.write(tokens.tobytes() + weights.astype(WEIGHT).tobytes())


@contextmanager
def readable_tokens(path: Path) -> Iterator[None]:
    """Raise BadInput instead of an OSError in the `with` block, which reads `path`.

    A FileNotFoundError passes through, because a file that is being prepared may be renamed to its final name at this
    moment.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where = error.filename or path
        advice = "check name and permissions" if error.errno else "move it away"
        raise BadInput(f"{where}: cannot be read: {error.strerror or error}; {advice}") from error


def _row_length(path: Path, metadata: object) -> int:
    """Return the context length from the metadata of a file with weights. Raises BadInput if there is none."""
    match metadata:
        case {"context_length": str(text)} if text.isascii() and text.isdecimal() and int(text[:9]) > 0:
            return int(text[:9])
        case _:
            raise BadInput(f"{path}: has weights, but its metadata has no valid context_length; prepare it again")
