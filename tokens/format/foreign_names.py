"""File names of other programs' token files: which split a file belongs to, and which files make up a split.

llm.c and kjj0's sets: `fineweb_train_000001.bin`, `fineweb_val_000000.bin`; nanoGPT: `train.bin`, `val.bin`;
build-nanogpt: `edufineweb_train_000001.npy`, `edufineweb_val_000000.npy`.
"""

import itertools
import re
from collections.abc import Iterable

import attrs

from common.errors import BadInput
from common.files import by_number

SUFFIXES = ("bin", "npy")

_SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}


@attrs.frozen
class ForeignName:
    """A token file's name, taken apart."""

    name: str
    suffix: str
    split: str | None  # None where it names none, or two
    token_set: str  # the words beside split and number; "" of nanoGPT's files
    number: int | None  # of a shard

    @property
    def is_bare(self) -> bool:
        """True for nanoGPT's: `train.bin`, `val.bin`."""
        return self.split is not None and self.token_set == "" and self.number is None


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
    """Return the names of token files by split, in the order of their numbers. `where` names their folder, for errors.

    Raises BadInput for files of several sets or formats, a name without a split, and a missing shard.
    """
    found = [parsed for parsed in map(parse_name, sorted(names, key=by_number)) if parsed is not None]
    by_split: dict[str, list[ForeignName]] = {}
    for file in found:
        if file.split is None:
            raise BadInput(
                f"{where}/{file.name}: is it training or validation data? wanted one of the words train, val or test "
                "in its name, as in fineweb_train_000001.bin; rename it or move it away"
            )
        if file.suffix != found[0].suffix:
            raise BadInput(f"{where}: holds both {found[0].name} and {file.name}; keep files of one format")
        if file.token_set != found[0].token_set:
            raise BadInput(f"{where}: holds {found[0].name} and {file.name}, of two sets of tokens; keep one set")
        by_split.setdefault(file.split, []).append(file)
    for files in by_split.values():
        _check_numbers(where, files)
    return {split: [file.name for file in files] for split, files in by_split.items()}


def _check_numbers(where: object, files: list[ForeignName]) -> None:
    """Raise BadInput unless this is one file, or shards with consecutive numbers."""
    numbers = [file.number for file in files]
    if len(files) == 1:
        return
    if None in numbers or len(set(numbers)) < len(numbers):
        raise BadInput(f"{where}: holds both {files[0].name} and {files[1].name}; keep one of them")
    known = sorted(number for number in numbers if number is not None)
    gap = next((number for number, other in itertools.pairwise(known) if other != number + 1), None)
    if gap is not None:
        before = next(file.name for file in files if file.number == gap)
        raise BadInput(f"{where}: incomplete shards: the one after {before} is missing; download it again")
