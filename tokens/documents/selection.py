"""Selection of documents in a folder, a glob or a prefix: which files are left out, and why.

A published dataset has training files next to files for validation and test, a dataset card, and other files about the
data. Only documents meant for training may be read, so several splits are refused, and every omission is reported.
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
# Words that name the split of a file, on the Hugging Face hub and in ordinary file names.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trainset", "trainingset", "traindata"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "validate", "valset", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "testset", "evalset", "testdata", "testmini"), "test"),
    **dict.fromkeys(("heldout", "holdout"), "test"),
}
HELD_OUT = re.compile(r"(held|hold)[-_. ]out")  # "held out" or "hold out", written as two words
# Folders whose .md and .py files belong to a split. A folder with another name, such as `training`, often contains code
# or documentation.
SPLIT_FOLDERS = ("train", "validation", "valid", "val", "dev", "test")
# How the names of files about a dataset begin, in lower case. A text file with such a name counts as a card if record
# files are next to it.
CARDS = ("readme", "license", "licence", "citation", "changelog", "notice", "contributing", "code_of_conduct")
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "croissant.json", "state.json")
TOKEN_SUFFIXES = (".bin", ".npy", ".safetensors")  # files of token ids
# Data formats that cannot be read. A README next to such files is a card, too.
DATA_SUFFIXES = (
    *(".csv", ".tsv", ".arrow", ".xml", ".html", ".warc", ".xlsx", ".feather", ".avro", ".orc", ".h5", ".tfrecord"),
    *(".zip", ".tar", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".tgz", *TOKEN_SUFFIXES),
)


@attrs.define
class Selection:
    """Names of files below a folder: the documents, and the files that are left out."""

    documents: list[str] = attrs.field(factory=list)
    left_out: dict[str, list[str]] = attrs.field(factory=dict)  # by kind

    def leave_out(self, kind: str, name: str) -> None:
        self.left_out.setdefault(kind, []).append(name)

    def notes(self, where: str, full_name: Callable[[str], str] = str) -> list[Notice]:
        """Return a note for each kind of file that is left out, and for each suspicious mixture of files that are read.

        `full_name` returns the name under which a file is shown.
        """
        notices = [
            note(f"{where}: {kind} are left out: {list_briefly(map(full_name, names))}")
            for kind, names in self.left_out.items()
        ]
        records = [name for name in self.documents if name.endswith(RECORD_SUFFIXES)]
        if 0 < len(records) < len(self.documents):
            texts = [name for name in self.documents if not name.endswith(RECORD_SUFFIXES)]
            kinds = (
                f"{len(records):,} with records and {len(texts):,} with text ({list_briefly(map(full_name, texts))})"
            )
            notices.append(note(f"{where}: contains files with records and files with text, and all are read: {kinds}"))
        splits = by_split(records)
        if splits.keys() == {TRAIN, None}:
            train_names, other_names = (list_briefly(map(full_name, splits[split])) for split in (TRAIN, None))
            mixture = f"files without a split in their names are read along with train files: {other_names}"
            advice = "if files without a split are held out, name only the train files"
            notices.append(note(f"{where}: {mixture} (train: {train_names}); {advice}"))
        if copies := _same_stems(records):
            names = [list_briefly(map(full_name, group)) for group in copies]
            problem = f"files that differ only in format are all read: {list_briefly(names)}"
            notices.append(note(f"{where}: {problem}; if they contain the same records, name only one of them"))
        return notices


def select(where: str, names: Iterable[str], is_card: Callable[[str], bool] = lambda name: False) -> Selection:
    """Decide which files of the folder `where` are documents. `names` are their paths in this folder.

    `is_card` says whether the content of a README describes a dataset of the hub. Raises BadInput if the files belong
    to several splits of a dataset.
    """
    selection, visible = Selection(), list[str]()
    for name in names:
        if name.endswith(SUFFIXES) and any(part.startswith(".") for part in name.split("/")):
            selection.leave_out("hidden files", name)
        elif not any(part.startswith(".") for part in name.split("/")[:-1]):
            visible.append(name)
    documents = [name for name in visible if name.endswith(SUFFIXES) and _base(name) not in DESCRIPTIONS]
    has_records = any(name.endswith(RECORD_SUFFIXES) for name in documents)
    has_data = has_records or any(name.endswith(DATA_SUFFIXES) for name in visible)
    readmes = [name for name in documents if "/" not in name and _base(name).startswith("readme")]
    is_hub_dataset = any(map(is_card, readmes)) or any(_base(name) == "dataset_infos.json" for name in visible)
    for name in visible:
        if _base(name) in DESCRIPTIONS:
            selection.leave_out("descriptions of a dataset", name)
        elif name.endswith(TOKEN_SUFFIXES):
            selection.leave_out("files of token ids, which contain no text,", name)
        elif not name.endswith(SUFFIXES):
            if not _base(name).startswith("."):
                selection.leave_out(OTHER_KINDS, name)
        elif name.endswith(TEXT_SUFFIXES) and (has_data or is_hub_dataset) and _base(name).startswith(CARDS):
            selection.leave_out("cards and licenses", name)
        elif name.endswith((".md", ".py")) and is_hub_dataset and (has_records or name in readmes):
            selection.leave_out("cards and scripts of a dataset", name)
        else:
            selection.documents.append(name)
    refuse_several_splits(where, where, selection.documents)
    return selection


def refuse_several_splits(where: str, top: str, names: list[str]) -> None:
    """Raise BadInput if the files `names` below the folder `top` belong to several splits.

    `where` is the source as the user spelled it.
    """
    splits = by_split(names)
    if not are_mixed(splits):
        return
    split = next(iter(splits))
    advice = f"name one of them, such as {_pattern(top, splits[split], names)}, or name every file to read them all"
    raise BadInput(f"{where}: contains several splits: {describe_splits(splits)}; {advice}")


def split_of_source(name: str) -> str | None:
    """Return the split to which a file belongs, judging by its name and folder, or None if neither names a split."""
    *folders, file = name.split("/")
    for folder in reversed(folders):
        if folder.lower() in (SPLIT_FOLDERS if name.endswith((".md", ".py")) else SPLIT_WORDS):
            return SPLIT_WORDS[folder.lower()]
    if name.endswith((".md", ".py")):
        return None  # train.py is code, and testing.md is a chapter
    words = re.split(r"[-._ \d]+", HELD_OUT.sub(r"\1out", _stem(file).lower()))
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else None


def by_split(names: Iterable[str]) -> dict[str | None, list[str]]:
    """Group names by their split. The group of names without a split comes last."""
    names_by_split: dict[str | None, list[str]] = {}
    for name in names:
        names_by_split.setdefault(split_of_source(name), []).append(name)
    ordered = sorted(names_by_split, key=lambda split: (split is None, split != TRAIN, split))
    return {split: names_by_split[split] for split in ordered}


def are_mixed(splits: dict[str | None, list[str]]) -> bool:
    """Return whether some of the names belong to a held-out split, and some to another split.

    Text files count as mixed only if there is a training split, because a name such as test.txt alone says little.
    """
    if len(splits) < 2 or splits.keys() <= {None, TRAIN}:
        return False
    return TRAIN in splits or any(name.endswith(RECORD_SUFFIXES) for names in splits.values() for name in names)


def describe_splits(splits: dict[str | None, list[str]]) -> str:
    """List the splits with the number of files in each, for example "train in 2 files, test in 1"."""
    counts = [f"{split or 'no split'} in {len(names):,}" for split, names in splits.items()]
    plural = "s" * (len(next(iter(splits.values()))) > 1)
    return f"{counts[0]} file{plural}{''.join(f', {count}' for count in counts[1:])}"


def list_briefly(names: Iterable[str]) -> str:
    """Return the alphabetically first name and the number of other names, such as "a.txt and 3 more"."""
    sorted_names = sorted(names)
    return sorted_names[0] + (f" and {len(sorted_names) - 1:,} more" if len(sorted_names) > 1 else "")


def _pattern(where: str, split_names: list[str], names: list[str]) -> str:
    """Return a folder or a quoted glob that matches exactly `split_names` among the `names` below `where`.

    If there is no such pattern, return the first of `split_names`.
    """
    top = where.rstrip("/")
    other_names = [name for name in names if name not in set(split_names)]
    folders = [str(parent) for parent in PurePath(split_names[0]).parents][:-1]
    for folder in reversed(folders):
        if all(name.startswith(f"{folder}/") for name in split_names) and not any(
            name.startswith(f"{folder}/") for name in other_names
        ):
            return f"{top}/{folder}"
    common = itertools.takewhile(lambda characters: len({*characters}) == 1, zip(*split_names, strict=False))
    start = "".join(characters[0] for characters in common)
    suffix = split_names[0].removeprefix(_stem(split_names[0]))
    pattern = re.compile(rf"{re.escape(start)}[^/]*{re.escape(suffix)}")
    if (
        len(split_names) > 1
        and all(map(pattern.fullmatch, split_names))
        and not any(map(pattern.fullmatch, other_names))
    ):
        return f"'{top}/{start}*{suffix}'"
    return f"{top}/{split_names[0]}"


def _stem(file: str) -> str:
    """Return a file's name without the suffix that shows its kind."""
    return next(
        (file.removesuffix(suffix) for suffix in sorted(SUFFIXES, key=len, reverse=True) if file.endswith(suffix)), file
    )


def _same_stems(names: Iterable[str]) -> list[list[str]]:
    """Return groups of names that differ only in their suffixes, such as a.jsonl and a.jsonl.gz."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_stem(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _base(name: str) -> str:
    return name.rpartition("/")[2].lower()
