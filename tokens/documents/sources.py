"""Sources: SOURCE arguments resolved to input files, local, remote or of a Hugging Face dataset."""

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
    counted,
    first,
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
        """Its entry in the manifest, in which a dataset of the hub always has hf: before its name.

        So a reader can tell OWNER/NAME of the hub from a local folder of that name.
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
        """The source as a plan records it: its URLs have no password and no signature, which may differ next time."""
        inputs = [attrs.evolve(item, path=redacted_name(item.path)) for item in self.inputs]
        return Source(redacted_name(self.name), tuple(inputs))


def resolve_sources(names: Sequence[str], kept: Iterable[Source] = ()) -> list[Source]:
    """Return the files of each SOURCE, in the order of their names; of a hub dataset at the commit of `kept` sources.

    Notes files that are left out or named twice, and sources of several splits. Raises BadInput for no files, unknown
    kinds, unreadable ones, and a folder or glob that holds several splits.
    """
    sources = [Source(name, tuple(_resolve(name, kept))) for name in names]
    paths = [item.path for source in sources for item in source.inputs]
    for path in paths:
        _check_kind(path)
    counts = Counter(path if REMOTE in path else os.path.realpath(path) for path in paths)
    twice = [path for path, count in counts.items() if count > 1]
    if twice:
        show(note(f"named twice, so prepared twice: {first(twice)}"))
    if STANDARD_LIBRARY not in names:  # which has modules of any name
        splits = by_split("/".join(path.split("/")[-2:]) for path in paths)
        if are_mixed(splits):
            show(note(f"the sources hold several splits, and all are read: {counted(splits)}"))
    return sources


def _resolve(name: str, kept: Iterable[Source]) -> list[Input]:
    if name.startswith(HUB) or _is_on_hub(name):
        plain = name.removeprefix(HUB)
        paths = [item.path for one in kept if one.name.removeprefix(HUB) == plain for item in one.inputs]
        found = _hub_dataset(name, next((commit for path in paths for commit in COMMIT.findall(path)), None))
        if found == sorted(found, key=lambda item: item.path):  # else its card gives the order
            found.sort(key=lambda item: by_number(item.path))
        return found
    if name == STANDARD_LIBRARY:
        return [look_up(str(path)) for path in _standard_library()]
    found = _remote_files(name) if REMOTE in name else _local_files(name)
    return sorted(found, key=lambda item: by_number(item.path))


def _is_on_hub(name: str) -> bool:
    """Tell whether OWNER/NAME[:CONFIG][@REVISION] is a dataset of the hub, as there is no such file.

    Raises BadInput for a name that is close to a local one.
    """
    repository = name.partition("@")[0].partition(":")[0]
    is_file = os.path.lexists(name) or name.endswith((*SUFFIXES, *TOKEN_SUFFIXES))
    if is_file or REMOTE in name or not re.fullmatch(REPOSITORY, repository, re.ASCII):
        return False
    hub_name(repository, DATASET, [], lambda path: True)
    return True


def _local_files(name: str) -> list[Input]:
    """Return the documents of a folder or glob, or a file of that name."""
    path = Path(name)
    with readable(name):
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        found, top = _folder(path), path
        card = path / CARD
        if not found.documents or (card.is_file() and _describes_dataset(card)):
            note_local(name, DATASET)  # nothing to read here, or a copy of a dataset of the hub
    elif is_file:
        return [look_up(str(path.absolute()))]
    else:
        matches = [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207  # absolute patterns
        top = Path(re.split(r"[^/]*[*?[]", name, maxsplit=1)[0])
        names = [str(match.relative_to(top)) for match in matches if match.is_file()]
        if not names:
            near = None if glob.has_magic(name) else nearest_folder(name, [], lambda path: True)
            meant = "" if near is None else f"; did you mean {near}?"
            raise BadInput(
                f"{name}: no such file, folder or glob{meant}; quote a glob so that the shell leaves it alone"
            )
        if all(one.endswith(SUFFIXES) for one in names):
            refuse_several_splits(name, str(top), names)
        found = Selection(names)
    show(*found.notes(name, lambda one: str(top / one)))
    if not found.documents:
        raise BadInput(f"{name}: a folder without documents; wanted files ending in {', '.join(SUFFIXES)}")
    return [look_up(str((top / one).absolute())) for one in found.documents]


def _folder(top: Path) -> Selection:
    """Return which files below a folder are documents; token directories are left out as a whole."""

    def refuse(error: OSError) -> None:
        with readable(error.filename):
            raise error

    names, others = list[str](), list[str]()
    seen = set()  # links may lead in circles
    for name, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        folder = Path(name)
        has_tokens = _has_tokens(files)
        if has_tokens and folder == top:
            raise BadInput(f"{top}: holds tokens; name a folder of documents")
        if has_tokens:
            others.append(str(folder.relative_to(top)))
        if has_tokens or folder.resolve() in seen:
            folders.clear()
            continue
        seen.add(folder.resolve())
        folders.sort()
        for file in files:
            path = folder / file
            with readable(str(path)):
                is_other = not path.is_file() and path.exists()  # a link that leads nowhere will be refused by name
            (others if is_other else names).append(str(path.relative_to(top)))
    found = select(str(top), names, lambda name: _describes_dataset(top / name))
    for name in others:
        found.leave_out(OTHER_KINDS, name)
    return found


def _describes_dataset(path: Path) -> bool:
    """Tell whether a README begins with the metadata of a dataset on the hub."""
    with readable(str(path)), path.open("rb") as file:
        head = file.read(CARD_BYTES)
    metadata = re.match(rb"---\r?\n(.*?)\n---", head, re.DOTALL)
    return metadata is not None and CARD_KEYS.search(metadata[1]) is not None


def _has_tokens(names: Iterable[str]) -> bool:
    """Tell whether a folder with files of these names is a token directory, finished or not."""
    names = set(names)
    begun = any(name in {"ledger.jsonl", ".lock"} or name.startswith(".checkpoint-") for name in names)
    return (PLAN in names and begun) or (MANIFEST in names and any(map(split_of, names)))


def _remote_files(name: str) -> list[Input]:
    """Return the documents of a URL: a file, a glob, or all below a folder."""
    found = find_remote(name)
    if name in found:
        return [remote_input(found[name])]
    top = f"{name.rstrip('/')}/"
    if is_glob := glob.has_magic(name):
        top = re.split(r"[^/]*[*?[]", name, maxsplit=1)[0]
    folders: dict[str, list[str]] = {}
    for url in found:
        folders.setdefault(url.rpartition("/")[0], []).append(url.rpartition("/")[2])
    tokens = tuple(f"{folder}/" for folder, files in folders.items() if _has_tokens(files))
    urls = {url.removeprefix(top): url for url in found if is_glob or not url.startswith(tokens)}
    if is_glob:
        chosen = Selection([*urls])
        if all(one.endswith(SUFFIXES) for one in urls):
            refuse_several_splits(name, top, [*urls])
    else:
        chosen = select(name, urls)
        for folder in tokens:
            urls[folder.removeprefix(top)] = folder
            chosen.leave_out(OTHER_KINDS, folder.removeprefix(top))
    show(*chosen.notes(name, lambda one: urls[one]))
    if not chosen.documents:
        raise BadInput(f"{name}: holds no documents; wanted files ending in {', '.join(SUFFIXES)}")
    return [remote_input(found[urls[one]]) for one in chosen.documents]


def _hub_dataset(name: str, commit: str | None) -> list[Input]:
    """Return the files of the train split of hf:OWNER/NAME[:CONFIG][@REVISION], at a commit or its revision."""
    import datasets

    quiet()
    dataset, _, revision = name.removeprefix(HUB).partition("@")
    repository, _, configuration = dataset.partition(":")
    with hub_errors(f"{name}: cannot be resolved on the hub", "read"):
        builder = datasets.load_dataset_builder(repository, configuration or None, revision=commit or revision or None)
        files = {str(split): [str(url) for url in found] for split, found in (builder.config.data_files or {}).items()}
        urls = files.pop(TRAIN, [])
        if elsewhere := [url for url in urls if not url.startswith((HUB_FILES, "https://"))]:
            # A dataset's card names them: a stranger must not choose a bucket that is read with the user's keys.
            raise BadInput(f"{name}: names {elsewhere[0]}; wanted files of the hub or of https://")
        inputs = [remote_input(look_up_remote(url)) for url in urls]
    if not inputs:
        raise BadInput(f"{name}: no files of a train split; name its files: hf://datasets/{repository}/...")
    if files:
        others = ", ".join(f"{len(found):,} of {split}" for split, found in files.items())
        show(note(f"{name}: reads {len(inputs):,} files of {TRAIN}; other splits are left out: {others}"))
    return inputs


def _standard_library() -> list[Path]:
    """Return Python's own library sources, by a hash of their names: any range of them is a fair sample of all."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)]
    return sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest())


def _check_kind(path: str) -> None:
    if path.endswith(SUFFIXES):
        return
    if path.endswith(TOKEN_SUFFIXES):
        advice = 'name their text, or train on their folder: "dataset" in train.json, or train.py RUN --token-files DIR'
        raise BadInput(f"{path}: holds token ids, no documents; {advice}")
    raise BadInput(f"{path}: unknown kind of document; wanted a name ending in {', '.join(SUFFIXES)}")
