"""Download of token files from the hub or a bucket: once per machine, resumable, no more shards than a run reads."""

import glob
import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attrs

from common.bucket import Bucket, StoredObject
from common.checks import integer
from common.errors import BadInput
from common.files import free_disk, is_bucket, locked_partial, replace_file, writing
from common.hub_client import HUB, download_snapshot
from common.json_files import read_json
from common.output import note, progress, show
from common.text import distinct_bytes, readable_bytes
from tokens.format.foreign_files import SUFFIXES, foreign_names, parse_name, read_foreign_header
from tokens.format.manifest import has_split, split_of

RECEIPT = "download.json"  # written last: without it a download is incomplete
BEGUN = ".partial-download.json"  # of a bucket's download that is not complete: its files are ours
PATTERNS = ["*.safetensors", "*.json", "*.tiktoken"]  # of our format
ALL_PATTERNS = [*PATTERNS, *(f"*.{suffix}" for suffix in SUFFIXES)]
TOKENS = (".safetensors", *SUFFIXES)  # end the names of token files
CLOCK_TICK = 2.0  # seconds, of the coarsest file system


def download_dataset(dataset: str, directory: Path, train_tokens: int | None = None) -> None:
    """Download the token files of a hub dataset, or under a bucket's URL, unless the directory has them.

    `train_tokens`: how many train tokens are wanted, None for all; of our own format there are all or, for 0, none.
    Raises BadInput when the server cannot be reached, refuses, has no token files, or the disk is too small.
    """
    if is_bucket(dataset):
        _download_bucket(dataset, directory)
        return
    dataset = dataset.removeprefix(HUB)
    if is_complete(directory, train_tokens):
        if not (directory / RECEIPT).is_file():
            show(
                note(
                    f"dataset {dataset}: reads the token files in {directory}, which were not downloaded from the "
                    "hub by this program; move that folder away to download the dataset"
                )
            )
        return
    commit = _read_receipt(directory).get("commit")
    source = _Source(dataset, directory, commit if isinstance(commit, str) else None)
    listed = source.snapshot(ALL_PATTERNS, dry_run=True)
    if listed:
        source = attrs.evolve(source, commit=listed[0].commit_hash)  # files fetched later are of the same commit
    sizes = {file.filename: file.file_size or 0 for file in listed}
    if any(map(split_of, sizes)):
        patterns = PATTERNS
        if train_tokens == 0:
            patterns = [glob.escape(name) for name in sizes if split_of(name) != "train" and parse_name(name) is None]
        source.fetch(patterns)
        tokens = 0 if train_tokens == 0 else None
    else:
        tokens = _download_foreign(source, sizes, train_tokens)
    _write_receipt(directory, {"dataset": dataset, "commit": source.commit, "train_tokens": tokens})


def is_complete(directory: Path, train_tokens: int | None = None) -> bool:
    """Tell whether the directory holds a download with so many train tokens, or token files from elsewhere."""
    if (directory / RECEIPT).is_file():
        here = tokens_downloaded(directory)
        enough = here is None or (train_tokens is not None and train_tokens <= here)
        return enough and (train_tokens == 0 or has_split(directory))
    return not (directory / ".cache").exists() and has_split(directory)


def tokens_downloaded(directory: Path) -> int | None:
    """Return how many train tokens are here of a dataset of which only the first shards are, None for any other."""
    tokens = _read_receipt(directory).get("train_tokens")
    return tokens if integer(0).holds(tokens) else None


def hub_name(directory: Path) -> str | None:
    """Return OWNER/NAME of the dataset that was downloaded into a directory, or None."""
    dataset = _read_receipt(directory).get("dataset")
    return dataset if isinstance(dataset, str) else None


@attrs.frozen
class _Source:
    """A dataset at a commit, and the directory for its files."""

    dataset: str
    directory: Path
    commit: str | None  # None: the newest

    def fetch(self, patterns: list[str]) -> None:
        """Download the files whose names match. Raises BadInput where the disk is too small."""
        listed = self.snapshot(patterns, dry_run=True)
        for name in (file.filename for file in listed if file.will_download):
            if not _came_from_hub(self.directory, name):
                _refuse_replacing(self.directory / name, f"dataset {self.dataset}")
        wanted = sum(file.file_size or 0 for file in listed if file.will_download)
        _check_room(self.dataset, self.directory, wanted)
        show(progress(f"downloading {readable_bytes(wanted)} of dataset {self.dataset} to {self.directory}"))
        self.snapshot(patterns, dry_run=False)

    def snapshot(self, patterns: list[str], *, dry_run: bool) -> Any:
        """Download the files whose names match, or with `dry_run` return their DryRunFileInfo."""
        problem = f"cannot be downloaded into {self.directory}"
        advice = ", or pass --token-files DIR with files that you have"
        options = {"revision": self.commit, "local_dir": self.directory, "dry_run": dry_run}
        return download_snapshot(self.dataset, "dataset", patterns, problem, advice, **options)


def _download_foreign(source: _Source, sizes: dict[str, int], train_tokens: int | None) -> int | None:
    """Download other programs' shards with so many train tokens; return how many these hold, None for all."""
    by_split = foreign_names(f"dataset {source.dataset}", [name for name in sizes if "/" not in name])
    train = by_split.pop("train", [])
    if not train:
        name = source.dataset
        raise BadInput(f"dataset {name}: got no token files; for its text run prepare_data.py hf:{name} --output DIR")
    held_out = [glob.escape(name) for files in by_split.values() for name in files]
    source.fetch([*held_out, *(glob.escape(name) for name in train[: train_tokens != 0])])
    if train_tokens == 0:
        return 0
    first = read_foreign_header(source.directory / train[0])  # the others are like it
    held = [(sizes[name] - first.offset_bytes) // first.dtype.itemsize for name in train]
    shards = len(train)
    if train_tokens is not None:
        shards = next((count for count in range(1, shards) if sum(held[:count]) >= train_tokens), shards)
    source.fetch([glob.escape(name) for name in train[:shards]])
    return sum(held[:shards]) if shards < len(train) else None


def _download_bucket(url: str, directory: Path) -> None:
    """Download the token files directly under a bucket's prefix. Raises BadInput as `download_dataset`."""
    if (directory / RECEIPT).is_file():
        return
    bucket = Bucket(url)
    objects = {
        name: found
        for name, found in bucket.objects().items()
        if "/" not in name and any(fnmatch(name, pattern) for pattern in ALL_PATTERNS)
    }
    if not any(name.endswith(TOKENS) for name in objects):
        raise BadInput(f"dataset {url}: got no token files there, wanted train.safetensors, or shards (.bin, .npy)")
    here = {path.name for path in directory.glob("[!.]*") if path.name.endswith(TOKENS)}
    if strange := sorted(here - {*objects}):
        raise BadInput(f"{directory / strange[0]}: is not in {url}, but of another preparation; delete it")
    missing = {name: found for name, found in objects.items() if not _is_here(directory / name, found)}
    begun = directory / BEGUN
    for name in () if begun.exists() else missing:
        _refuse_replacing(directory / name, url)
    _check_room(url, directory, sum(found.size_bytes for found in missing.values()))
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(begun, json.dumps({"dataset": url}) + "\n")
    for name, found in missing.items():
        partial = directory / f".partial-{name}"
        with writing(partial), locked_partial(partial) as file:
            if _is_here(directory / name, found):  # another process has downloaded it meanwhile
                partial.unlink()
                continue
            for _, piece in bucket.pieces(name, found.size_bytes, found.e_tag):
                file.write(piece)
            file.flush()
            os.utime(partial, (found.written_at, found.written_at))
            partial.replace(directory / name)
    _write_receipt(directory, {"dataset": url})
    with writing(begun):
        begun.unlink(missing_ok=True)


def _refuse_replacing(path: Path, source: str) -> None:
    """Raise BadInput if a file that no download has written has the name of one that is to be downloaded."""
    if path.exists():
        size = f"{path.stat().st_size:,} bytes"
        raise BadInput(
            f"{path}: exists ({size}), and the file of that name of {source} is another one, which would replace it; "
            "move it away, or pass --token-files DIR with files that you have"
        )


def _came_from_hub(directory: Path, name: str) -> bool:
    """Tell whether the hub's client has written a file, which nothing has changed since."""
    record = directory / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    path = directory / name
    return path.exists() and record.exists() and path.stat().st_mtime <= record.stat().st_mtime + CLOCK_TICK


def _is_here(path: Path, found: StoredObject) -> bool:
    """Tell whether a file is this object: by size and time, as `aws s3 sync` does, not one of another preparation."""
    here = path.stat() if path.is_file() else None
    return here is not None and here.st_size == found.size_bytes and abs(here.st_mtime - found.written_at) < CLOCK_TICK


def _check_room(dataset: str, directory: Path, wanted_bytes: int) -> None:
    existing, free_bytes = free_disk(directory)
    if wanted_bytes > free_bytes:
        free_text, wanted = distinct_bytes(free_bytes, wanted_bytes)
        got = f"{free_text} free at {existing}"
        advice = "free some, or pass --token-files DIR on a larger disk"
        raise BadInput(f"dataset {dataset}: got {got}, wanted {wanted}; {advice}")


def _write_receipt(directory: Path, receipt: dict[str, Any]) -> None:
    with writing(directory / RECEIPT):
        replace_file(directory / RECEIPT, json.dumps(receipt) + "\n")


def _read_receipt(directory: Path) -> dict[str, Any]:
    receipt = directory / RECEIPT
    return read_json(receipt, advice="delete it") if receipt.is_file() else {}
