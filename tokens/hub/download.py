"""Download token files from the hub or a bucket, once for each machine. An interrupted download can be resumed."""

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

RECEIPT = "download.json"  # written last, so a download without it is incomplete
INCOMPLETE = ".partial-download.json"  # marks an incomplete download from a bucket, so its files can be replaced
PATTERNS = ["*.safetensors", "*.json", "*.tiktoken"]  # files of our format
ALL_PATTERNS = [*PATTERNS, *(f"*.{suffix}" for suffix in SUFFIXES)]
TOKENS = (".safetensors", *SUFFIXES)  # endings of the names of token files
CLOCK_TICK = 2.0  # seconds; the coarsest resolution of a file system's times


def download_dataset(dataset: str, directory: Path, train_tokens: int | None = None) -> None:
    """Download the token files of a hub dataset, or those at a bucket's URL, unless the directory already has them.

    `train_tokens` is the number of train tokens that are needed, or None for all. A dataset in our own format is
    downloaded with all of its train tokens, or with none if `train_tokens` is 0. Raises BadInput if the server cannot
    be reached or refuses, if there are no token files, or if the disk is too small.
    """
    if is_bucket(dataset):
        _download_bucket(dataset, directory)
        return
    dataset = dataset.removeprefix(HUB)
    if is_complete(directory, train_tokens):
        if not (directory / RECEIPT).is_file():
            show(
                note(
                    f"dataset {dataset}: the token files in {directory} are read instead; they were not downloaded "
                    "from the hub by this program; move that folder away to download the dataset"
                )
            )
        return
    commit = _read_receipt(directory).get("commit")
    source = _Source(dataset, directory, commit if isinstance(commit, str) else None)
    listed = source.snapshot(ALL_PATTERNS, dry_run=True)
    if listed:
        source = attrs.evolve(source, commit=listed[0].commit_hash)  # later fetches must read the same commit
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
    """Return whether the directory contains token files from elsewhere, or a download that is large enough.

    A download is large enough if it has all train tokens of the dataset, or at least `train_tokens` of them.
    """
    if (directory / RECEIPT).is_file():
        downloaded = tokens_downloaded(directory)
        enough = downloaded is None or (train_tokens is not None and train_tokens <= downloaded)
        return enough and (train_tokens == 0 or has_split(directory))
    return not (directory / ".cache").exists() and has_split(directory)


def tokens_downloaded(directory: Path) -> int | None:
    """If a directory has only the first train shards of a dataset, return the number of their tokens, else None."""
    tokens = _read_receipt(directory).get("train_tokens")
    return tokens if integer(0).holds(tokens) else None


def hub_name(directory: Path) -> str | None:
    """Return OWNER/NAME of the dataset that was downloaded to a directory, or None."""
    dataset = _read_receipt(directory).get("dataset")
    return dataset if isinstance(dataset, str) else None


@attrs.frozen
class _Source:
    """A dataset at a commit, and the directory for its files."""

    dataset: str
    directory: Path
    commit: str | None  # None means the newest commit

    def fetch(self, patterns: list[str]) -> None:
        """Download the files whose names match a pattern. Raises BadInput if the disk is too small."""
        listed = self.snapshot(patterns, dry_run=True)
        for name in (file.filename for file in listed if file.will_download):
            if not _came_from_hub(self.directory, name):
                _refuse_replacing(self.directory / name, f"dataset {self.dataset}")
        download_bytes = sum(file.file_size or 0 for file in listed if file.will_download)
        _check_room(self.dataset, self.directory, download_bytes)
        show(progress(f"downloading {readable_bytes(download_bytes)} of dataset {self.dataset} to {self.directory}"))
        self.snapshot(patterns, dry_run=False)

    def snapshot(self, patterns: list[str], *, dry_run: bool) -> Any:
        """Download the files whose names match a pattern. With `dry_run`, only return their DryRunFileInfo."""
        problem = f"cannot be downloaded into {self.directory}"
        advice = ", or name a directory with files that you have"
        options = {"revision": self.commit, "local_dir": self.directory, "dry_run": dry_run}
        return download_snapshot(self.dataset, "dataset", patterns, problem, advice, **options)


def _download_foreign(source: _Source, sizes: dict[str, int], train_tokens: int | None) -> int | None:
    """Download a dataset of another program: the held-out splits, and train shards with at least `train_tokens` tokens.

    Returns the number of tokens in these train shards, or None if the dataset has no other train shards.
    """
    by_split = foreign_names(f"dataset {source.dataset}", [name for name in sizes if "/" not in name])
    train = by_split.pop("train", [])
    if not train:
        name = source.dataset
        raise BadInput(
            f"dataset {name}: contains no token files; to prepare its text, run prepare_data.py hf:{name} --output DIR"
        )
    held_out = [glob.escape(name) for files in by_split.values() for name in files]
    source.fetch([*held_out, *(glob.escape(name) for name in train[: train_tokens != 0])])
    if train_tokens == 0:
        return 0
    first = read_foreign_header(source.directory / train[0])  # the other shards have the same format
    shard_tokens = [(sizes[name] - first.offset_bytes) // first.dtype.itemsize for name in train]
    shards = len(train)
    if train_tokens is not None:
        shards = next((count for count in range(1, shards) if sum(shard_tokens[:count]) >= train_tokens), shards)
    source.fetch([glob.escape(name) for name in train[:shards]])
    return sum(shard_tokens[:shards]) if shards < len(train) else None


def _download_bucket(url: str, directory: Path) -> None:
    """Download the token files directly below a bucket's prefix. Raises BadInput like `download_dataset`."""
    if (directory / RECEIPT).is_file():
        return
    bucket = Bucket(url)
    objects = {
        name: stored
        for name, stored in bucket.objects().items()
        if "/" not in name and any(fnmatch(name, pattern) for pattern in ALL_PATTERNS)
    }
    if not any(name.endswith(TOKENS) for name in objects):
        raise BadInput(f"dataset {url}: contains no token files; wanted train.safetensors, or shards (.bin, .npy)")
    local_names = {path.name for path in directory.glob("[!.]*") if path.name.endswith(TOKENS)}
    if unknown_names := sorted(local_names - {*objects}):
        raise BadInput(
            f"{directory / unknown_names[0]}: is not in {url}, so it belongs to another preparation; delete it"
        )
    missing = {name: stored for name, stored in objects.items() if not _is_downloaded(directory / name, stored)}
    incomplete_mark = directory / INCOMPLETE
    for name in () if incomplete_mark.exists() else missing:
        _refuse_replacing(directory / name, url)
    _check_room(url, directory, sum(stored.size_bytes for stored in missing.values()))
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(incomplete_mark, json.dumps({"dataset": url}) + "\n")
    for name, stored in missing.items():
        partial = directory / f".partial-{name}"
        with writing(partial), locked_partial(partial) as file:
            if _is_downloaded(directory / name, stored):  # another process has downloaded the file in the meantime
                partial.unlink()
                continue
            for _, piece in bucket.pieces(name, stored.size_bytes, stored.e_tag):
                file.write(piece)
            file.flush()
            os.utime(partial, (stored.written_at, stored.written_at))
            partial.replace(directory / name)
    _write_receipt(directory, {"dataset": url})
    with writing(incomplete_mark):
        incomplete_mark.unlink(missing_ok=True)


def _refuse_replacing(path: Path, source: str) -> None:
    """Raise BadInput if a file that was not downloaded would be replaced by a download."""
    if path.exists():
        size = f"{path.stat().st_size:,} bytes"
        raise BadInput(
            f"{path}: exists ({size}), and a different file with this name in {source} would replace it; move it away, "
            "or name a directory with files that you have"
        )


def _came_from_hub(directory: Path, name: str) -> bool:
    """Return whether the hub's client wrote a file and the file has not changed since."""
    record = directory / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    path = directory / name
    return path.exists() and record.exists() and path.stat().st_mtime <= record.stat().st_mtime + CLOCK_TICK


def _is_downloaded(path: Path, stored: StoredObject) -> bool:
    """Return whether a local file is a copy of this object, judging by its size and time, as `aws s3 sync` does.

    A file of another preparation is not a copy.
    """
    status = path.stat() if path.is_file() else None
    return (
        status is not None
        and status.st_size == stored.size_bytes
        and abs(status.st_mtime - stored.written_at) < CLOCK_TICK
    )


def _check_room(dataset: str, directory: Path, download_bytes: int) -> None:
    existing, free_bytes = free_disk(directory)
    if download_bytes > free_bytes:
        free_text, needed_text = distinct_bytes(free_bytes, download_bytes)
        got = f"{free_text} free at {existing}"
        advice = "free some space, or name a directory on a larger disk"
        raise BadInput(f"dataset {dataset}: got {got}, wanted {needed_text}; {advice}")


def _write_receipt(directory: Path, receipt: dict[str, Any]) -> None:
    with writing(directory / RECEIPT):
        replace_file(directory / RECEIPT, json.dumps(receipt) + "\n")


def _read_receipt(directory: Path) -> dict[str, Any]:
    receipt = directory / RECEIPT
    return read_json(receipt, advice="delete it") if receipt.is_file() else {}
