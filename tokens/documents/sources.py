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

from common.errors import BadInput, say
from common.files import by_number
from common.hub_client import hub_errors, quiet
from common.remote_files import REMOTE, find_remote, look_up_remote
from tokens.documents.inputs import SUFFIXES, Input, look_up, readable, remote_input
from tokens.format.manifest import SourceRecord

STANDARD_LIBRARY = "stdlib"
HUB = "hf:"
COMMIT = re.compile("@([0-9a-f]{40})/")  # in the URL of a hub dataset's file


@attrs.frozen
class Source:
    """One SOURCE argument."""

    name: str
    inputs: tuple[Input, ...]

    @property
    def record(self) -> SourceRecord:
        """Its entry in the manifest."""
        size = sum(item.size_bytes for item in self.inputs)
        return SourceRecord(name=self.name, files=len(self.inputs), bytes=size)


def resolve_sources(names: Sequence[str], kept: Iterable[Source] = ()) -> list[Source]:
    """Return the files of each SOURCE, in the order of their names; of a hub dataset at the commit of `kept` sources.

    Notes files left out or named twice. Raises BadInput for no files, unknown kinds and unreadable ones.
    """
    sources = [Source(name, tuple(_resolve(name, kept))) for name in names]
    counts = Counter(item.path for source in sources for item in source.inputs)
    for path in counts:
        if not path.endswith(SUFFIXES):
            raise BadInput(f"{path}: unknown kind of document; wanted a name ending in {', '.join(SUFFIXES)}")
    twice = [path for path, count in counts.items() if count > 1]
    if twice:
        say(f"NOTE: named twice, so prepared twice: {_first(twice)}")
    return sources


def _resolve(name: str, kept: Iterable[Source]) -> list[Input]:
    if name.startswith(HUB):
        paths = [item.path for source in kept if source.name == name for item in source.inputs]
        found = _hub_dataset(name, next((commit for path in paths for commit in COMMIT.findall(path)), None))
        if found == sorted(found, key=lambda item: item.path):  # else its card gives the order
            found.sort(key=lambda item: by_number(item.path))
        return found
    if name == STANDARD_LIBRARY:
        return [look_up(str(path)) for path in _standard_library()]
    if REMOTE in name:
        found, others = _remote_files(name)
    else:
        files, others = _local_files(name)
        found = [look_up(str(file.absolute())) for file in files]
    if others:
        say(f"NOTE: {name}: files of other kinds are left out: {_first(others)}")
    return sorted(found, key=lambda item: by_number(item.path))


def _local_files(name: str) -> tuple[list[Path], list[str]]:
    """Return the files of a folder, glob or file name, and other files in the folder."""
    path = Path(name)
    with readable(name):
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        found, others = _folder(path)
        if not found:
            raise BadInput(f"{name}: a folder without documents; wanted files ending in {', '.join(SUFFIXES)}")
        return found, others
    found = [path] if is_file else [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207  # absolute patterns
    found = [file for file in found if file.is_file()]
    if not found:
        raise BadInput(f"{name}: no such file, folder or glob; quote a glob so that the shell leaves it alone")
    return found, []


def _folder(top: Path) -> tuple[list[Path], list[str]]:
    """Return the files of documents below a folder; and other files, and token directories as a whole."""

    def refuse(error: OSError) -> None:
        with readable(error.filename):
            raise error

    found, others = [], []
    seen = set()  # links may lead in circles
    for name, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        folder = Path(name)
        has_tokens = _has_tokens(files)
        if has_tokens and folder == top:
            raise BadInput(f"{top}: holds tokens; name a folder of documents")
        if has_tokens:
            others.append(str(folder))
        if has_tokens or folder.resolve() in seen:
            folders.clear()
            continue
        seen.add(folder.resolve())
        folders.sort()
        for file in files:
            path = folder / file
            with readable(str(path)):
                if not path.is_file() and path.exists():  # a link that leads nowhere will be refused by name
                    continue
            if file.endswith(SUFFIXES):
                found.append(path)
            elif not file.startswith("."):
                others.append(str(path))
    return found, others


def _has_tokens(names: Iterable[str]) -> bool:
    """Tell whether a folder with files of these names is a token directory, finished or not."""
    names = set(names)
    begun = any(name in {"ledger.jsonl", ".lock"} or name.startswith(".checkpoint-") for name in names)
    return "plan.json" in names and begun


def _remote_files(name: str) -> tuple[list[Input], list[str]]:
    """Return the files of a URL, and other files in the folder that it names."""
    found, others = find_remote(name), []
    if not glob.has_magic(name) and name not in found:
        names: dict[str, list[str]] = {}  # by folder
        for url in found:
            names.setdefault(url.rpartition("/")[0], []).append(url.rpartition("/")[2])
        tokens = tuple(f"{folder}/" for folder, files in names.items() if _has_tokens(files))
        others = sorted(url for url in found if not url.endswith(SUFFIXES) or url.startswith(tokens))
        for url in others:
            del found[url]
    if not found:
        raise BadInput(f"{name}: holds no documents; wanted files ending in {', '.join(SUFFIXES)}")
    return [remote_input(file) for file in found.values()], others


def _hub_dataset(name: str, commit: str | None) -> list[Input]:
    """Return the files of the train split of hf:OWNER/NAME[:CONFIG][@REVISION], at a commit or its revision."""
    import datasets

    quiet()
    dataset, _, revision = name.removeprefix(HUB).partition("@")
    repository, _, configuration = dataset.partition(":")
    with hub_errors(f"{name}: cannot be resolved on the hub", "read"):
        builder = datasets.load_dataset_builder(repository, configuration or None, revision=commit or revision or None)
        urls = [str(url) for url in (builder.config.data_files or {}).get("train", [])]
        inputs = [remote_input(look_up_remote(url)) for url in urls]
    if not inputs:
        raise BadInput(f"{name}: no files of a train split; name its files: hf://datasets/{repository}/...")
    return inputs


def _standard_library() -> list[Path]:
    """Return Python's own library sources, by a hash of their names: any range of them is a fair sample of all."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)]
    return sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest())


def _first(paths: list[str]) -> str:
    return min(paths) + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")
