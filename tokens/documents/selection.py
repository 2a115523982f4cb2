"""The selection of documents in a folder, a glob or a prefix: the files that are left out, and why.

A published dataset has files for training next to files for validation and test, a card and other files about the
data. Only documents to train on may be read, so several splits are refused, and everything that is left out is named.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import PurePath

import attrs

from common.errors import BadInput
from common.output import Notice, note
from tokens.documents.inputs import RECORD_SUFFIXES, SUFFIXES, TEXT_SUFFIXES

TRAIN = "train"
OTHER_KINDS = "files of other kinds"
# Words that name the split of a file, as on the Hugging Face hub, and as people name files.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trainset", "trainingset", "traindata"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "validate", "valset", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "testset", "evalset", "testdata", "testmini"), "test"),
    **dict.fromkeys(("heldout", "holdout"), "test"),
}
HELD_OUT = re.compile(r"(held|hold)[-_. ]out")  # one word in two
# Folders whose texts are of a split. Words such as `training` and `evaluation` are common names of code and chapters.
SPLIT_FOLDERS = ("train", "validation", "valid", "val", "dev", "test")
# Files about a dataset, by the beginning of the name in lower case: a text with such a name next to records is a card.
CARDS = ("readme", "license", "licence", "citation", "changelog", "notice", "contributing", "code_of_conduct")
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "croissant.json", "state.json")
TOKEN_SUFFIXES = (".bin", ".npy", ".safetensors")  # of files of token ids
# Files that hold data, but which are not read: next to them a README is a card, too.
DATA_SUFFIXES = (
    *(".csv", ".tsv", ".arrow", ".xml", ".html", ".warc", ".xlsx", ".feather", ".avro", ".orc", ".h5", ".tfrecord"),
    *(".zip", ".tar", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".tgz", *TOKEN_SUFFIXES),
)


@attrs.define
class Selection:
    """Names of files below a folder, by what becomes of them."""

    documents: list[str] = attrs.field(factory=list)
    left_out: dict[str, list[str]] = attrs.field(factory=dict)  # by kind

    def leave_out(self, kind: str, name: str) -> None:
        self.left_out.setdefault(kind, []).append(name)

    def notes(self, where: str, shown: Callable[[str], str] = str) -> list[Notice]:
        """Return a note for each kind of file that is left out, and one where records and texts are mixed.

        `shown`: gives the full name of a file.
        """
        notices = [
            note(f"{where}: {kind} are left out: {first(map(shown, names))}") for kind, names in self.left_out.items()
        ]
        records = [name for name in self.documents if name.endswith(RECORD_SUFFIXES)]
        if 0 < len(records) < len(self.documents):
            texts = [name for name in self.documents if not name.endswith(RECORD_SUFFIXES)]
            kinds = f"{len(records):,} with records and {len(texts):,} with text ({first(map(shown, texts))})"
            notices.append(note(f"{where}: holds files of several kinds, and all are read: {kinds}"))
        splits = by_split(records)
        if splits.keys() == {TRAIN, None}:
            named, unnamed = (first(map(shown, splits[split])) for split in (TRAIN, None))
            beside = f"files that name no split are read next to those of train: {unnamed} (train: {named})"
            notices.append(note(f"{where}: {beside}; if they are held out, name the files of train alone"))
        if copies := _same_stems(records):
            names = [first(map(shown, one)) for one in copies]
            read = f"files of one name in several formats are all read: {first(names)}"
            notices.append(note(f"{where}: {read}; if they hold the same records, name one of them"))
        return notices


def select(where: str, names: Iterable[str], is_card: Callable[[str], bool] = lambda name: False) -> Selection:
    """Return which files below the folder `where`, given by their relative names, are documents.

    `is_card`: tells whether a README describes a dataset of the hub, by its content.
    Raises BadInput for several splits of one dataset.
    """
    found, visible = Selection(), list[str]()
    for name in names:
        if name.endswith(SUFFIXES) and any(part.startswith(".") for part in name.split("/")):
            found.leave_out("hidden files", name)
        elif not any(part.startswith(".") for part in name.split("/")[:-1]):
            visible.append(name)
    documents = [name for name in visible if name.endswith(SUFFIXES) and _base(name) not in DESCRIPTIONS]
    holds_records = any(name.endswith(RECORD_SUFFIXES) for name in documents)
    holds_data = holds_records or any(name.endswith(DATA_SUFFIXES) for name in visible)
    readmes = [name for name in documents if "/" not in name and _base(name).startswith("readme")]
    is_hub_dataset = any(map(is_card, readmes)) or any(_base(name) == "dataset_infos.json" for name in visible)
    for name in visible:
        if _base(name) in DESCRIPTIONS:
            found.leave_out("descriptions of a dataset", name)
        elif name.endswith(TOKEN_SUFFIXES):
            found.leave_out("files of token ids, which hold no text,", name)
        elif not name.endswith(SUFFIXES):
            if not _base(name).startswith("."):
                found.leave_out(OTHER_KINDS, name)
        elif name.endswith(TEXT_SUFFIXES) and (holds_data or is_hub_dataset) and _base(name).startswith(CARDS):
            found.leave_out("cards and licenses", name)
        elif name.endswith((".md", ".py")) and is_hub_dataset and (holds_records or name in readmes):
            found.leave_out("cards and scripts of a dataset", name)
        else:
            found.documents.append(name)
    refuse_several_splits(where, where, found.documents)
    return found


def refuse_several_splits(where: str, top: str, names: list[str]) -> None:
    """Raise BadInput where `names`, relative to the folder `top`, are of several splits; `where`: as the user says."""
    splits = by_split(names)
    if not are_mixed(splits):
        return
    wanted = next(iter(splits))
    advice = f"name one of them, such as {_pattern(top, splits[wanted], names)}, or each file to read them all"
    raise BadInput(f"{where}: holds several splits: {counted(splits)}; {advice}")


def split_of_source(name: str) -> str | None:
    """Return the split that a file's name or folder says it belongs to, None where it says nothing."""
    *folders, file = name.split("/")
    for folder in reversed(folders):
        if folder.lower() in (SPLIT_FOLDERS if name.endswith((".md", ".py")) else SPLIT_WORDS):
            return SPLIT_WORDS[folder.lower()]
    if name.endswith((".md", ".py")):
        return None  # train.py and testing.md are code, and a chapter
    words = re.split(r"[-._ \d]+", HELD_OUT.sub(r"\1out", _stem(file).lower()))
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else None


def by_split(names: Iterable[str]) -> dict[str | None, list[str]]:
    """Return names by their split, those that name none last."""
    found: dict[str | None, list[str]] = {}
    for name in names:
        found.setdefault(split_of_source(name), []).append(name)
    return {split: found[split] for split in sorted(found, key=lambda split: (split is None, split != TRAIN, split))}


def are_mixed(splits: dict[str | None, list[str]]) -> bool:
    """Tell whether names are of a held-out split and of another one as well.

    Among texts without a split to train on, a name such as test.txt says little.
    """
    if len(splits) < 2 or splits.keys() <= {None, TRAIN}:
        return False
    return TRAIN in splits or any(name.endswith(RECORD_SUFFIXES) for names in splits.values() for name in names)


def counted(splits: dict[str | None, list[str]]) -> str:
    """Return "train in 2 files, test in 1"."""
    counts = [f"{split or 'no split'} in {len(names):,}" for split, names in splits.items()]
    return (
        f"{counts[0]} file{'s' * (len(next(iter(splits.values()))) > 1)}{''.join(f', {each}' for each in counts[1:])}"
    )


def first(names: Iterable[str]) -> str:
    """Return the first of some names, and how many more there are."""
    listed = sorted(names)
    return listed[0] + (f" and {len(listed) - 1:,} more" if len(listed) > 1 else "")


def _pattern(where: str, wanted: list[str], names: list[str]) -> str:
    """Return a folder or a quoted glob of exactly these names below `where`, or else the first of them."""
    top = where.rstrip("/")
    others = [name for name in names if name not in set(wanted)]
    folders = [str(parent) for parent in PurePath(wanted[0]).parents][:-1]
    for folder in reversed(folders):
        if all(name.startswith(f"{folder}/") for name in wanted) and not any(
            name.startswith(f"{folder}/") for name in others
        ):
            return f"{top}/{folder}"
    equal = itertools.takewhile(lambda characters: len({*characters}) == 1, zip(*wanted, strict=False))
    start, suffix = "".join(characters[0] for characters in equal), wanted[0].removeprefix(_stem(wanted[0]))
    chosen = re.compile(rf"{re.escape(start)}[^/]*{re.escape(suffix)}")
    if len(wanted) > 1 and all(map(chosen.fullmatch, wanted)) and not any(map(chosen.fullmatch, others)):
        return f"'{top}/{start}*{suffix}'"
    return f"{top}/{wanted[0]}"


def _stem(file: str) -> str:
    """Return a file's name without the suffix of its kind."""
    return next(
        (file.removesuffix(suffix) for suffix in sorted(SUFFIXES, key=len, reverse=True) if file.endswith(suffix)), file
    )


def _same_stems(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that differ only in the suffix of their kind, such as a.jsonl and a.jsonl.gz."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_stem(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _base(name: str) -> str:
    return name.rpartition("/")[2].lower()
