"""Headers of other programs' token files, which are read as they are: llm.c's and nanoGPT's `.bin`, numpy's `.npy`."""

from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
import numpy.lib.format as npy

from common.errors import QUOTED_CHARACTERS, BadInput, quoted
from tokens.format.foreign_names import parse_name
from tokens.format.header import TokenFile, regular_file

LLM_C_HEADER_BYTES = 256 * 4  # int32: magic number, version, number of tokens, zeros
# By magic number: version and type of a token. The first is GPT-2's, the second Llama 3's.
LLM_C: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
NANOGPT = np.dtype("<u2")  # without a header

NPY_TYPES = (np.dtype("<u2"), np.dtype("<u4"))
NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # by version


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
        version = npy.read_magic(file)
        if version not in NPY_HEADERS:
            raise ValueError(f"got version {version}")
        shape, _, dtype = NPY_HEADERS[version](file)  # reads no pickle: data may be one
    except (ValueError, SyntaxError, TokenError, MemoryError, RecursionError) as error:  # all from numpy's parser
        said = " ".join(str(error).split())[:QUOTED_CHARACTERS]
        raise BadInput(f"{path}: not a .npy file, or cut short at {size} bytes: {said}; write it again") from error
    if dtype not in NPY_TYPES or len(shape) != 1:
        raise BadInput(
            f"{path}: got type {quoted(str(dtype))} and shape {quoted(shape)}, wanted uint16 or uint32, little-endian, "
            "and one dimension; save tokens.ravel().astype('<u2'), or '<u4' for large ids"
        )
    offset = file.tell()
    _check_size(path, size, offset, shape[0], dtype)
    return TokenFile(path, dtype, offset, shape[0])


def _check_size(path: Path, size: int, offset: int, count: int, dtype: np.dtype) -> None:
    wanted = offset + count * dtype.itemsize
    if count < 0 or size != wanted:
        raise BadInput(
            f"{path}: cut short or damaged: got {size} bytes, wanted {max(offset, wanted)} for its {count} tokens; "
            "download or copy it again"
        )
