"""Other programs' token files, which are read as they are: names, splits and headers of llm.c, nanoGPT and numpy."""

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
# By magic number: version and type of a token. The first is GPT-2's, the second Llama 3's.
LLM_C: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
NANOGPT = np.dtype("<u2")  # without a header

NPY_TYPES = (np.dtype("<u2"), np.dtype("<u4"))


@attrs.frozen
class ForeignName:
    """A token file's name, taken apart."""

    name: str
    suffix: str
    split: str | None  # None where it names none, or two
    token_set: str  # the words beside split and number; "" of nanoGPT's files
    number: int | None  # of a shard

    def renumbered(self, number: int) -> str:
        """Return the name of another shard, whose number has as many digits."""
        return re.sub(r"\d+(?=\.\w+$)", lambda digits: f"{number:0{len(digits[0])}d}", self.name, flags=re.ASCII)


def parse_name(name: str) -> ForeignName | None:
    """Return the parts of a token file's name, None for a file of another kind."""
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
    """Return the names of token files by split, in order. Raises BadInput for no whole set, naming folder `where`."""
    found = [parsed for parsed in map(parse_name, sorted(names, key=by_number)) if parsed is not None]
    by_split: dict[str, list[ForeignName]] = {}
    for file in found:
        if file.split is None:
            raise BadInput(f"{where}/{file.name}: names no split, or two: name it train, val or test, or move it")
        if file.suffix != found[0].suffix:
            raise BadInput(f"{where}: holds both {found[0].name} and {file.name}; keep files of one format")
        if file.token_set != found[0].token_set:
            raise BadInput(f"{where}: holds {found[0].name} and {file.name}, of two sets of tokens; keep one set")
        by_split.setdefault(file.split, []).append(file)
    for files in by_split.values():
        numbers = [file.number for file in files]
        if len(files) > 1 and (None in numbers or len(set(numbers)) < len(numbers)):
            raise BadInput(f"{where}: holds both {files[0].name} and {files[1].name}; keep one of them")
        known = sorted(number for number in numbers if number is not None)
        gap = next((pair for pair in itertools.pairwise(known) if pair[1] != pair[0] + 1), None)
        if gap is not None:
            before = next(file for file in files if file.number == gap[0])
            first, last = before.renumbered(gap[0] + 1), before.renumbered(gap[1] - 1)
            missing = (
                f"{first} is missing; download it" if first == last else f"{first} to {last} are missing; download them"
            )
            raise BadInput(f"{where}: incomplete shards: {missing} again")
    return {split: [file.name for file in files] for split, files in by_split.items()}


def describe_missing_first(directory: Path, stream: Sequence[TokenFile]) -> list[Notice]:
    """Return a note if the first shards of a split are not in its folder, or if that looks so by their numbers.

    Numbers begin at 0 or 1, or after those of another split: llm.c's first shard is to validate on. A folder may hold
    later shards on purpose, so they are read.
    """
    parsed = parse_name(stream[0].path.name) if stream else None
    if parsed is None or parsed.number is None or parsed.number < 2:
        return []
    with readable_tokens(directory):
        others = [other for other in map(parse_name, (path.name for path in directory.glob("*"))) if other is not None]
    if any(other.number == parsed.number - 1 and other.token_set == parsed.token_set for other in others):
        return []
    before = parsed.renumbered(parsed.number - 1)
    without = f"the ones before it, such as {before}, which are not here; download those to read the whole stream"
    return [note(f"{directory}: its {parsed.split} shards begin with {parsed.name}, and are read without {without}")]


def read_foreign_header(path: Path) -> TokenFile:
    """Return the token file behind a path. Raises BadInput for another kind of file, or one that is cut short."""
    with readable_tokens(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _read_npy(path, size) if path.suffix == ".npy" else _read_bin(path, file, size)


def _read_bin(path: Path, file: BinaryIO, size: int) -> TokenFile:
    header = file.read(LLM_C_HEADER_BYTES)
    magic = int.from_bytes(header[:4], "little")
    if magic not in LLM_C:
        name = parse_name(path.name)
        if name is None or name.split is None or (name.token_set, name.number) != ("", None):
            known = f"{' or '.join(map(str, LLM_C))}, llm.c's of uint16 and uint32 tokens"
            advice = "download it again (nanoGPT's files, which have none, are train.bin and val.bin)"
            raise BadInput(f"{path}: got magic number {magic}, wanted {known}; {advice}")
        if size % NANOGPT.itemsize:
            raise BadInput(f"{path}: got {size} bytes, wanted an even number: uint16 tokens; copy it again")
        return TokenFile(path, NANOGPT, 0, size // NANOGPT.itemsize)
    if len(header) < LLM_C_HEADER_BYTES:
        raise BadInput(f"{path}: cut short: got {size} bytes, wanted a header of {LLM_C_HEADER_BYTES}; copy it again")
    version, count = (int.from_bytes(header[at : at + 4], "little", signed=True) for at in (4, 8))
    wanted, dtype = LLM_C[magic]
    if version != wanted:
        raise BadInput(f"{path}: got version {version}, wanted {wanted} after magic number {magic}; download it again")
    _check_size(path, size, LLM_C_HEADER_BYTES, count, dtype)
    return TokenFile(path, dtype, LLM_C_HEADER_BYTES, count)


def _read_npy(path: Path, size: int) -> TokenFile:
    try:
        array = npy.open_memmap(path, mode="r")  # reads no pickle: data may be one
    except (ValueError, SyntaxError, TokenError, MemoryError, RecursionError, OverflowError) as error:
        said = " ".join(str(error).split())[:QUOTED_CHARACTERS]
        raise BadInput(f"{path}: not a .npy file, or cut short at {size} bytes: {said}; write it again") from error
    if array.dtype not in NPY_TYPES or array.ndim != 1:
        got, wanted = f"type {array.dtype} and shape {array.shape}", "uint16 or uint32, little-endian, one dimension"
        advice = "save tokens.ravel().astype('<u2'), or '<u4' for large ids"
        raise BadInput(f"{path}: got {got:.200}, wanted {wanted}; {advice}")
    _check_size(path, size, array.offset, len(array), array.dtype)
    return TokenFile(path, array.dtype, array.offset, len(array))


def _check_size(path: Path, size: int, offset: int, count: int, dtype: np.dtype) -> None:
    wanted = offset + count * dtype.itemsize
    if count < 0 or size != wanted:
        raise BadInput(f"{path}: cut short or damaged: got {size} bytes, wanted {max(offset, wanted)}; copy it again")
