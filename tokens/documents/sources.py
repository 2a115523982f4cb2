"""Sources: resolve SOURCE arguments to input files, which are local, remote, or part of a Hugging Face dataset."""

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import by_number
from common.hub_client import (
    CARD,
    CARD_BYTES,
    DATASET,
    HUB,
    REPOSITORY,
    hub_errors,
    hub_name,
    nearest_folder,
    note_local,
    quiet,
)
from common.output import note, show
from common.redaction import redacted_name
from common.remote_files import HUB_FILES, REMOTE, find_remote, look_up_remote
from tokens.documents.inputs import SUFFIXES, Input, look_up, readable, remote_input
from tokens.documents.selection import (
    OTHER_KINDS,
    TOKEN_SUFFIXES,
    TRAIN,
    Selection,
    are_mixed,
    by_split,
    describe_splits,
    list_briefly,
    refuse_several_splits,
    select,
)
from tokens.format.manifest import MANIFEST, PLAN, SourceRecord, split_of

STANDARD_LIBRARY = "stdlib"
CARD_KEYS = re.compile(
    rb"^(dataset_info|configs|license|task_categories|size_categories|language|pretty_name)\s*:", re.M
)
COMMIT = re.compile("@([0-9a-f]{40})/")  # in the URL of a hub dataset's file


@attrs.frozen
class Source:
    """One SOURCE argument."""

    name: str
    inputs: tuple[Input, ...]

    @property
    def record(self) -> SourceRecord:
        """The source's entry in the manifest.

        In the manifest, the name of a dataset of the hub always begins with hf:, which distinguishes OWNER/NAME on the
        hub from a local folder with the same name.
        """
        size = sum(item.size_bytes for item in self.inputs)
        is_remote = any(REMOTE in item.path for item in self.inputs)
        name = (
            f"{HUB}{self.name}"
            if is_remote and not self.name.startswith(HUB) and REMOTE not in self.name
            else self.name
        )
        return SourceRecord(name=redacted_name(name), files=len(self.inputs), bytes=size)

    @property
    def recorded(self) -> "Source":
        """The source as a plan records it: without the passwords and signatures in URLs, which may change."""
        inputs = [attrs.evolve(item, path=redacted_name(item.path)) for item in self.inputs]
        return Source(redacted_name(self.name), tuple(inputs))


def resolve_sources(names: Sequence[str], recorded_sources: Iterable[Source] = ()) -> list[Source]:
    """Return one `Source` per SOURCE argument, in the order of `names`.

    A dataset of the hub that is among `recorded_sources` is resolved to the commit that is recorded there. Prints notes
    about files that are left out or named twice, and a note if the sources together contain several splits. Raises
    BadInput if there are no files, if a file is unreadable or of an unknown kind, or if a single folder or glob
    contains several splits.
    """
    sources = [Source(name, tuple(_resolve(name, recorded_sources))) for name in names]
    paths = [item.path for source in sources for item in source.inputs]
    for path in paths:
        _check_kind(path)
    counts = Counter(path if REMOTE in path else os.path.realpath(path) for path in paths)
    duplicates = [path for path, count in counts.items() if count > 1]
    if duplicates:
        show(note(f"named twice, so prepared twice: {list_briefly(duplicates)}"))
    if STANDARD_LIBRARY not in names:  # a library module may be named `test`, for example
        splits = by_split("/".join(path.split("/")[-2:]) for path in paths)
        if are_mixed(splits):
            show(note(f"the sources contain several splits, and all are read: {describe_splits(splits)}"))
    return sources


def _resolve(name: str, recorded_sources: Iterable[Source]) -> list[Input]:
    if name.startswith(HUB) or _is_on_hub(name):
        dataset = name.removeprefix(HUB)
        paths = [
            item.path
            for source in recorded_sources
            if source.name.removeprefix(HUB) == dataset
            for item in source.inputs
        ]
        inputs = _hub_dataset(name, next((commit for path in paths for commit in COMMIT.findall(path)), None))
        # Alphabetical order puts file 10 before file 2, so such a list is sorted by number. Any other order was chosen
        # by the author of the dataset's card, so it is kept.
        if inputs == sorted(inputs, key=lambda item: item.path):
            inputs.sort(key=lambda item: by_number(item.path))
        return inputs
    if name == STANDARD_LIBRARY:
        return [look_up(str(path)) for path in _standard_library()]
    inputs = _remote_files(name) if REMOTE in name else _local_files(name)
    return sorted(inputs, key=lambda item: by_number(item.path))


def _is_on_hub(name: str) -> bool:
    """Return whether a source is a dataset of the hub, OWNER/NAME[:CONFIG][@REVISION], and not a local file.

    Raises BadInput if the name is similar to the name of a local file or folder.
    """
    repository = name.partition("@")[0].partition(":")[0]
    is_file = os.path.lexists(name) or name.endswith((*SUFFIXES, *TOKEN_SUFFIXES))
    if is_file or REMOTE in name or not re.fullmatch(REPOSITORY, repository, re.ASCII):
        return False
    hub_name(repository, DATASET, [], lambda path: True)
    return True


def _local_files(name: str) -> list[Input]:
    """Return the documents of a folder or glob, or a single file."""
    path = Path(name)
    with readable(name):
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        selection, top = _folder(path), path
        card = path / CARD
        if not selection.documents or (card.is_file() and _describes_dataset(card)):
            note_local(name, DATASET)  # the folder has nothing to read, or is a copy of a dataset of the hub
    elif is_file:
        return [look_up(str(path.absolute()))]
    else:
        # Path.glob would refuse an absolute pattern.
        matches = [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207
        top = Path(re.split(r"[^/]*[*?[]", name, maxsplit=1)[0])
        names = [str(match.relative_to(top)) for match in matches if match.is_file()]
        if not names:
            similar_name = None if glob.has_magic(name) else nearest_folder(name, [], lambda path: True)
            hint = "" if similar_name is None else f"; did you mean {similar_name}?"
            raise BadInput(
                f"{name}: no such file, folder or glob{hint}; put a glob in quotes so that the shell does not expand it"
            )
        if all(file_name.endswith(SUFFIXES) for file_name in names):
            refuse_several_splits(name, str(top), names)
        selection = Selection(names)
    show(*selection.notes(name, lambda file_name: str(top / file_name)))
    if not selection.documents:
        raise BadInput(f"{name}: the folder has no documents; wanted files ending in {', '.join(SUFFIXES)}")
    return [look_up(str((top / file_name).absolute())) for file_name in selection.documents]


def _folder(top: Path) -> Selection:
    """Return which files below a folder are documents. Token directories are left out completely."""

    def refuse(error: OSError) -> None:
        with readable(error.filename):
            raise error

    names, other_names = list[str](), list[str]()
    visited = set()  # links may form circles
    for name, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        folder = Path(name)
        has_tokens = _has_tokens(files)
        if has_tokens and folder == top:
            raise BadInput(f"{top}: contains tokens; name a folder of documents instead")
        if has_tokens:
            other_names.append(str(folder.relative_to(top)))
        if has_tokens or folder.resolve() in visited:
            folders.clear()
            continue
        visited.add(folder.resolve())
        folders.sort()
        for file in files:
            path = folder / file
            with readable(str(path)):
                is_special = not path.is_file() and path.exists()  # a broken link counts as a file and is refused later
            (other_names if is_special else names).append(str(path.relative_to(top)))
    selection = select(str(top), names, lambda name: _describes_dataset(top / name))
    for name in other_names:
        selection.leave_out(OTHER_KINDS, name)
    return selection


def _describes_dataset(path: Path) -> bool:
    """Return whether a README begins with the metadata of a dataset on the hub."""
    with readable(str(path)), path.open("rb") as file:
        head = file.read(CARD_BYTES)
    metadata = re.match(rb"---\r?\n(.*?)\n---", head, re.DOTALL)
    return metadata is not None and CARD_KEYS.search(metadata[1]) is not None


def _has_tokens(names: Iterable[str]) -> bool:
    """Return whether a folder that contains these file names is a token directory, finished or not."""
    names = set(names)
    is_unfinished = any(name in {"ledger.jsonl", ".lock"} or name.startswith(".checkpoint-") for name in names)
    return (PLAN in names and is_unfinished) or (MANIFEST in names and any(map(split_of, names)))


def _remote_files(name: str) -> list[Input]:
    """Return the documents of a URL, which is a file, a glob, or a folder with everything below it."""
    remote_files = find_remote(name)
    if name in remote_files:
        return [remote_input(remote_files[name])]
    top = f"{name.rstrip('/')}/"
    if is_glob := glob.has_magic(name):
        top = re.split(r"[^/]*[*?[]", name, maxsplit=1)[0]
    folders: dict[str, list[str]] = {}
    for url in remote_files:
        folders.setdefault(url.rpartition("/")[0], []).append(url.rpartition("/")[2])
    token_folders = tuple(f"{folder}/" for folder, files in folders.items() if _has_tokens(files))
    urls = {url.removeprefix(top): url for url in remote_files if is_glob or not url.startswith(token_folders)}
    if is_glob:
        selection = Selection([*urls])
        if all(file_name.endswith(SUFFIXES) for file_name in urls):
            refuse_several_splits(name, top, [*urls])
    else:
        selection = select(name, urls)
        for folder in token_folders:
            urls[folder.removeprefix(top)] = folder
            selection.leave_out(OTHER_KINDS, folder.removeprefix(top))
    show(*selection.notes(name, lambda file_name: urls[file_name]))
    if not selection.documents:
        raise BadInput(f"{name}: contains no documents; wanted files ending in {', '.join(SUFFIXES)}")
    return [remote_input(remote_files[urls[file_name]]) for file_name in selection.documents]


def _hub_dataset(name: str, commit: str | None) -> list[Input]:
    """Return the files of the train split of hf:OWNER/NAME[:CONFIG][@REVISION], at `commit` or else at REVISION."""
    import datasets

    quiet()
    dataset, _, revision = name.removeprefix(HUB).partition("@")
    repository, _, configuration = dataset.partition(":")
    with hub_errors(f"{name}: cannot be resolved on the hub", "read"):
        builder = datasets.load_dataset_builder(repository, configuration or None, revision=commit or revision or None)
        files = {
            str(split): [str(url) for url in split_urls]
            for split, split_urls in (builder.config.data_files or {}).items()
        }
        urls = files.pop(TRAIN, [])
        if foreign_urls := [url for url in urls if not url.startswith((HUB_FILES, "https://"))]:
            # The card of a dataset names its files. A card may come from a stranger, so it must not be able to name
            # a bucket that only the user's keys can open.
            raise BadInput(f"{name}: refers to {foreign_urls[0]}; wanted only files of the hub or of https://")
        inputs = [remote_input(look_up_remote(url)) for url in urls]
    if not inputs:
        raise BadInput(f"{name}: has no files of a train split; name its files as hf://datasets/{repository}/...")
    if files:
        other_splits = ", ".join(f"{len(split_urls):,} of {split}" for split, split_urls in files.items())
        show(note(f"{name}: reads {len(inputs):,} files of {TRAIN}; other splits are left out: {other_splits}"))
    return inputs


def _standard_library() -> list[Path]:
    """Return the files of Python's own library, sorted by a hash of their names so that any range is a fair sample."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)]
    return sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest())


def _check_kind(path: str) -> None:
    if path.endswith(SUFFIXES):
        return
    if path.endswith(TOKEN_SUFFIXES):
        advice = (
            'name the text from which they were made, or train on their folder (with "dataset" in train.json, or with '
            "train.py RUN --token-files DIR)"
        )
        raise BadInput(f"{path}: contains token ids, not documents; {advice}")
    raise BadInput(f"{path}: unknown kind of document; wanted a name ending in {', '.join(SUFFIXES)}")
