"""Headers of other programs' token files, which are read as they are: llm.c's and nanoGPT's `.bin`, numpy's `.npy`."""

import ast
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import QUOTED_CHARACTERS, BadInput, quoted
from tokens.format.foreign_names import parse_name
from tokens.format.header import TokenFile, regular_file

LLM_C_HEADER_BYTES = 256 * 4  # int32: magic number, version, number of tokens, zeros
# By magic number: version and type of a token. The first is GPT-2's, the second Llama 3's.
LLM_C: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
NANOGPT = np.dtype("<u2")  # without a header

NPY = ("<u2", "<u4")
NPY_MAGIC = b"\x93NUMPY"
MOST_NPY_HEADER_BYTES = 10_000  # numpy's own limit


def read_foreign_header(path: Path) -> TokenFile:
    """Return the token file behind a path. Raises BadInput for another kind of file, or one that is cut short."""
    with regular_file(path) as (file, size):
        return _read_npy(path, file, size) if path.suffix == ".npy" else _read_bin(path, file, size)


def _read_bin(path: Path, file: BinaryIO, size: int) -> TokenFile:
    header = file.read(LLM_C_HEADER_BYTES)
    magic = int.from_bytes(header[:4], "little")
    if magic not in LLM_C:
        name = parse_name(path.name)
        if name is None or not name.is_bare:
            raise BadInput(
                f"{path}: got magic number {magic}, wanted {' or '.join(map(str, LLM_C))}, llm.c's of uint16 and "
                "uint32 tokens; download it again (nanoGPT's files, which have none, are train.bin and val.bin)"
            )
        if size % NANOGPT.itemsize:
            raise BadInput(f"{path}: got {size} bytes, wanted an even number: uint16 tokens; copy it again")
        return TokenFile(path, NANOGPT, 0, size // NANOGPT.itemsize)
    if len(header) < LLM_C_HEADER_BYTES:
        raise BadInput(f"{path}: cut short: got {size} bytes, wanted a header of {LLM_C_HEADER_BYTES}; copy it again")
    version, count = (int.from_bytes(header[at : at + 4], "little", signed=True) for at in (4, 8))
    wanted_version, dtype = LLM_C[magic]
    if version != wanted_version:
        raise BadInput(
            f"{path}: got version {version}, wanted {wanted_version} after magic number {magic}; it is damaged, or of "
            "another llm.c"
        )
    _check_size(path, size, LLM_C_HEADER_BYTES, count, dtype)
    return TokenFile(path, dtype, LLM_C_HEADER_BYTES, count)


def _read_npy(path: Path, file: BinaryIO, size: int) -> TokenFile:
    try:
        kind, shape = _npy_array(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        said = " ".join(str(error).split())[:QUOTED_CHARACTERS]
        raise BadInput(f"{path}: not a .npy file, or cut short at {size} bytes: {said}; write it again") from error
    if kind not in NPY or len(shape) != 1:
        raise BadInput(
            f"{path}: got type {quoted(kind)} and shape {quoted(shape)}, wanted {' or '.join(map(repr, NPY))}, uint16 "
            "or uint32, and one dimension; save tokens.ravel().astype('uint16'), or 'uint32' for large ids"
        )
    offset, dtype = file.tell(), np.dtype(kind)
    _check_size(path, size, offset, shape[0], dtype)
    return TokenFile(path, dtype, offset, shape[0])


def _npy_array(file: BinaryIO) -> tuple[Any, tuple[int, ...]]:
    """Return type and shape of a .npy file, which is read up to its data: they may be a pickle.

    The format is that of https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. Raises ValueError and
    what ast.literal_eval does.
    """
    if file.read(len(NPY_MAGIC)) != NPY_MAGIC:
        raise ValueError(f"wanted {NPY_MAGIC!r} at its beginning")
    major, _ = file.read(2)
    length = int.from_bytes(file.read(2 if major == 1 else 4), "little")
    header = file.read(min(length, MOST_NPY_HEADER_BYTES))
    if len(header) < length:
        raise ValueError(f"got a header of {len(header)} bytes, wanted {length}")
    match ast.literal_eval(header.decode(errors="replace").strip()):
        case {"descr": kind, "shape": tuple(shape)} if all(type(size) is int for size in shape):
            return kind, shape
        case _:
            raise ValueError("its header tells no type and shape")


def _check_size(path: Path, size: int, offset: int, count: int, dtype: np.dtype) -> None:
    wanted = offset + count * dtype.itemsize
    if count < 0 or size != wanted:
        raise BadInput(
            f"{path}: cut short or damaged: got {size} bytes, wanted {max(offset, wanted)} for its {count} tokens; "
            "download or copy it again"
        )
