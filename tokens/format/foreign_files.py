"""Token files of llm.c, nanoGPT and numpy, which are read without conversion: their names, splits and headers."""

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import attrs
import numpy as np
import numpy.lib.format as npy

from common.errors import BadInput
from common.files import by_number
from common.json_files import open_regular
from common.output import Notice, note
from common.text import QUOTED_CHARACTERS
from tokens.format.header import TokenFile, readable_tokens

SUFFIXES = ("bin", "npy")

_SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
LLM_C_HEADER_BYTES = 256 * 4  # int32: magic number, version, number of tokens, zeros
# Magic number -> version and type of a token. llm.c uses the first entry for GPT-2, and the second for Llama 3.
LLM_C: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
NANOGPT = np.dtype("<u2")  # these files have no header

NPY_TYPES = (np.dtype("<u2"), np.dtype("<u4"))


@attrs.frozen
class ForeignName:
    """The parts of a token file's name."""

    name: str
    suffix: str
    split: str | None  # None if the name contains no split, or several splits
    token_set: str  # the other words of the name; "" for nanoGPT's files, whose names have no other words
    number: int | None  # shard number

    def renumbered(self, number: int) -> str:
        """Return this name with another shard number, which is padded to as many digits as before."""
        return re.sub(r"\d+(?=\.\w+$)", lambda digits: f"{number:0{len(digits[0])}d}", self.name, flags=re.ASCII)


def parse_name(name: str) -> ForeignName | None:
    """Return the parts of a token file's name, or None if the name is not that of a token file."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or suffix not in SUFFIXES or name.startswith("."):
        return None
    *words, last = re.split(r"[._-]", stem)
    number = int(last) if re.fullmatch(r"\d{1,18}", last, re.ASCII) else None
    words += [last] if number is None else []
    splits = {_SPLITS[word] for word in words if word in _SPLITS}
    token_set = "_".join(word for word in words if word not in _SPLITS)
    return ForeignName(name, suffix, splits.pop() if len(splits) == 1 else None, token_set, number)


def foreign_names(where: object, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of token files, grouped by split and in order.

    Raises BadInput if the files are not one complete set. `where` is the folder that the message names.
    """
    parsed_names = [parsed for parsed in map(parse_name, sorted(names, key=by_number)) if parsed is not None]
    by_split: dict[str, list[ForeignName]] = {}
    for file in parsed_names:
        if file.split is None:
            raise BadInput(
                f"{where}/{file.name}: cannot tell its split; put exactly one of train, val and test into its name, "
                "or move the file away"
            )
        if file.suffix != parsed_names[0].suffix:
            raise BadInput(f"{where}: contains both {parsed_names[0].name} and {file.name}; keep files of one format")
        if file.token_set != parsed_names[0].token_set:
            raise BadInput(
                f"{where}: {parsed_names[0].name} and {file.name} belong to different token sets; keep only one set"
            )
        by_split.setdefault(file.split, []).append(file)
    for files in by_split.values():
        numbers = [file.number for file in files]
        if len(files) > 1 and (None in numbers or len(set(numbers)) < len(numbers)):
            raise BadInput(f"{where}: contains both {files[0].name} and {files[1].name}; keep only one of them")
        shard_numbers = sorted(number for number in numbers if number is not None)
        gap = next((pair for pair in itertools.pairwise(shard_numbers) if pair[1] != pair[0] + 1), None)
        if gap is not None:
            before = next(file for file in files if file.number == gap[0])
            first, last = before.renumbered(gap[0] + 1), before.renumbered(gap[1] - 1)
            missing = (
                f"{first} is missing; download it" if first == last else f"{first} to {last} are missing; download them"
            )
            raise BadInput(f"{where}: incomplete shards: {missing} again")
    return {split: [file.name for file in files] for split, files in by_split.items()}


def describe_missing_first(directory: Path, stream: Sequence[TokenFile]) -> list[Notice]:
    """Return a note if the numbers of a split's shards suggest that its first shards are missing from the folder.

    The numbers of a split start at 0 or 1, or they follow the numbers of another split, because llm.c uses its first
    shard for validation. A folder may contain only later shards on purpose, so this is a note and not an error.
    """
    parsed = parse_name(stream[0].path.name) if stream else None
    if parsed is None or parsed.number is None or parsed.number < 2:
        return []
    with readable_tokens(directory):
        folder_names = [parse_name(path.name) for path in directory.glob("*")]
    if any(
        name is not None and name.number == parsed.number - 1 and name.token_set == parsed.token_set
        for name in folder_names
    ):
        return []
    before = parsed.renumbered(parsed.number - 1)
    missing = f"earlier shards, such as {before}, are not in the folder; download them to read the complete stream"
    return [note(f"{directory}: its {parsed.split} shards start with {parsed.name}; {missing}")]


def read_foreign_header(path: Path) -> TokenFile:
    """Read the header of a token file at a path. Raises BadInput if the file has another format or is truncated."""
    with readable_tokens(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _read_npy(path, size) if path.suffix == ".npy" else _read_bin(path, file, size)


def _read_bin(path: Path, file: BinaryIO, size: int) -> TokenFile:
    header = file.read(LLM_C_HEADER_BYTES)
    magic = int.from_bytes(header[:4], "little")
    if magic not in LLM_C:
        name = parse_name(path.name)
        if name is None or name.split is None or (name.token_set, name.number) != ("", None):
            expected = f"{' or '.join(map(str, LLM_C))}, which llm.c writes before uint16 and uint32 tokens"
            advice = "download it again (only nanoGPT's files have no header, and they are named train.bin and val.bin)"
            raise BadInput(f"{path}: got magic number {magic}, wanted {expected}; {advice}")
        if size % NANOGPT.itemsize:
            raise BadInput(
                f"{path}: got {size} bytes, wanted an even number, because its tokens are uint16; copy it again"
            )
        return TokenFile(path, NANOGPT, 0, size // NANOGPT.itemsize)
    if len(header) < LLM_C_HEADER_BYTES:
        raise BadInput(f"{path}: truncated: got {size} bytes, wanted a header of {LLM_C_HEADER_BYTES}; copy it again")
    version, count = (int.from_bytes(header[at : at + 4], "little", signed=True) for at in (4, 8))
    expected_version, dtype = LLM_C[magic]
    if version != expected_version:
        raise BadInput(
            f"{path}: got version {version}, wanted {expected_version} after magic number {magic}; download it again"
        )
    _check_size(path, size, LLM_C_HEADER_BYTES, count, dtype)
    return TokenFile(path, dtype, LLM_C_HEADER_BYTES, count)


def _read_npy(path: Path, size: int) -> TokenFile:
    try:
        array = npy.open_memmap(path, mode="r")  # this never unpickles, so a malicious file is harmless
    except (ValueError, SyntaxError, TokenError, MemoryError, RecursionError, OverflowError) as error:
        numpy_message = " ".join(str(error).split())[:QUOTED_CHARACTERS]
        raise BadInput(
            f"{path}: not a .npy file, or truncated at {size} bytes: {numpy_message}; write it again"
        ) from error
    if array.dtype not in NPY_TYPES or array.ndim != 1:
        got, expected = f"type {array.dtype} and shape {array.shape}", "uint16 or uint32, little-endian, one dimension"
        advice = "save tokens.ravel().astype('<u2'), or '<u4' for large ids"
        raise BadInput(f"{path}: got {got:.200}, wanted {expected}; {advice}")
    _check_size(path, size, array.offset, len(array), array.dtype)
    return TokenFile(path, array.dtype, array.offset, len(array))


def _check_size(path: Path, size: int, offset: int, count: int, dtype: np.dtype) -> None:
    expected_size = offset + count * dtype.itemsize
    if count < 0 or size != expected_size:
        raise BadInput(
            f"{path}: truncated or damaged: got {size} bytes, wanted {max(offset, expected_size)}; copy it again"
        )
