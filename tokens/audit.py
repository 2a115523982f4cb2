"""How far token files have come, in a folder or a bucket, and whether they still hold what was written."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np

from errors import BadInput
from files import BLOCK_BYTES
from tokens.bucket import Bucket
from tokens.ledger import LEDGER, read_ledger, read_results
from tokens.manifest import MANIFEST, Manifest, open_listed, read_contents, read_manifest
from tokens.objects import Objects
from tokens.remote import REMOTE, THREADS
from tokens.splits import SPLITS
from tokens.token_file import HEADER_BYTES
from tokens.tokenizer import token_dtype
from tokens.unit_plan import PLAN, UnitPlan, read_plan


def status(where: str) -> list[str]:
    """Return how far a preparation into a folder or bucket has come, as lines. Raises BadInput where there is none."""
    with _described(where) as directory:
        plan = read_plan(directory)
        if plan is None:
            raise BadInput(f"{where}: no {PLAN}; prepare_data.py SOURCE... --output {where} begins one")
        totals, _ = read_ledger(directory)
        if (directory / MANIFEST).exists():
            state = "complete"
        else:
            age = time.time() - (directory / LEDGER).stat().st_mtime if (directory / LEDGER).exists() else 0
            state = f"not complete, last commit {age:.0f} s ago; the same command goes on"
    done, total = sum(plan.unit_bytes[: totals.units]), sum(plan.unit_bytes)
    tokens, documents = sum(totals.tokens.values()), sum(totals.documents.values())
    lines = [
        f"{where}: {state}",
        f"  units      {totals.units:,} of {len(plan.units):,} ({done / max(1, total):.1%} of {total:,} bytes)",
        f"  tokens     {tokens:,} in {documents:,} documents",
    ]
    lines += [
        f"  {split:10} {totals.tokens[split]:,} tokens, {totals.documents[split]:,} documents"
        for split in SPLITS
        if totals.tokens[split]
    ]
    if totals.problems:
        lines.append(f"  problems   {json.dumps(totals.problems)}, {totals.lost_documents:,} documents lost")
        lines += [f"    {example}" for example in totals.examples]
    return lines


def verify(where: str) -> list[str]:
    """Read every token file of a folder or bucket against its manifest.

    Raises BadInput naming what is damaged, and what it was made from.
    """
    with _described(where) as directory:
        manifest = read_manifest(directory)
        if manifest is None:
            raise BadInput(f"{where}: no {MANIFEST}; only a finished preparation has one")
        splits = [split for split in SPLITS if any(_is_of(name, split) for name in manifest.files)]
        streams: dict[str, Readable]
        check: Callable[[], object]
        if REMOTE in where:
            objects = Objects(where)
            streams = {split: _RemoteStream(objects, split, manifest) for split in splits}
            check = partial(_check_objects, objects, manifest)
        else:
            local = {split: open_listed(directory, split, manifest) for split in splits}
            streams = dict(local)
            check = partial(read_contents, [file for stream in local.values() for file in stream.files], manifest)
        try:
            check()
        except BadInput as error:
            damaged = _damaged_unit(directory, streams)
            if damaged is None:
                raise
            raise BadInput(f"{error}; damaged: {damaged}") from error
    size = sum(content.size_bytes for content in manifest.files.values())
    return [f"{where}: {len(manifest.files)} files, {size:,} bytes: all as written"]


@contextmanager
def _described(where: str) -> Iterator[Path]:
    """Give a folder with plan, ledger and manifest: a token directory itself, or a copy of what a bucket has."""
    if REMOTE not in where:
        yield Path(where)
        return
    with TemporaryDirectory() as folder:
        Bucket(where, Path(folder)).describe()
        yield Path(folder)


def _is_of(name: str, split: str) -> bool:
    return name.startswith((f"{split}.", f"{split}-"))


def _check_objects(objects: Objects, manifest: Manifest) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for (name, content), digest in zip(
            manifest.files.items(), threads.map(objects.sha256, manifest.files), strict=True
        ):
            if digest != content.sha256:
                raise BadInput(
                    f"{objects.url}/{name}: damaged: got sha256 {digest[:12]}..., wanted {content.sha256[:12]}... by "
                    f"{MANIFEST}; prepare it again"
                )


class Readable(Protocol):
    """The tokens of one split."""

    length: int

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start .. start + count, 1-D."""
        ...


class _RemoteStream:
    """The tokens of one split in a bucket."""

    def __init__(self, objects: Objects, split: str, manifest: Manifest):
        self._objects = objects
        self._dtype = token_dtype(manifest.tokenizer["vocabulary_size"]).newbyteorder("<")
        files = {name: entry for name, entry in manifest.files.items() if _is_of(name, split)}
        self._names = sorted(files)
        lengths = [(files[name].size_bytes - HEADER_BYTES) // self._dtype.itemsize for name in self._names]
        self._starts = [0, *itertools.accumulate(lengths)]
        self.length = self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        parts = [np.empty(0, self._dtype)]
        for name, (begin, end) in zip(self._names, itertools.pairwise(self._starts), strict=True):
            first, last = max(start, begin), min(start + count, end)
            if first < last:
                with self._objects.open(name) as stream:
                    stream.seek(HEADER_BYTES + (first - begin) * self._dtype.itemsize)
                    parts.append(np.frombuffer(stream.read((last - first) * self._dtype.itemsize), self._dtype))
        return np.concatenate(parts)


def _damaged_unit(directory: Path, streams: dict[str, Readable]) -> str | None:
    """Return which unit's tokens are not those of the ledger, and what they were made from."""
    import xxhash

    plan = read_plan(directory)
    if plan is None:
        return None
    _, cut = read_ledger(directory)
    tokens = _Tokens(streams, cut is not None)
    for result in read_results(directory):
        for split, part in result.parts.items():
            digest, begin = xxhash.xxh3_128(), tokens.position(split)
            for block in tokens.take(split, part.tokens):
                digest.update(block.tobytes())
            if digest.hexdigest() != part.digest:
                return (
                    f"tokens {begin:,} to {begin + part.tokens:,} of {split}, made from {_sources(plan, result.index)}"
                )
    return None


class _Tokens:
    """The tokens of each split in the order of the units; of a cut tail, train's go on in validation and test."""

    def __init__(self, streams: dict[str, Readable], cut: bool):
        self._cut = cut
        self._streams = streams
        self._positions = dict.fromkeys(SPLITS, 0)

    def position(self, split: str) -> int:
        return self._positions[split]

    def take(self, split: str, count: int) -> Iterator[np.ndarray]:
        """Yield the next tokens of a split, in blocks."""
        while count > 0:
            stream, offset = self._place(split)
            length = min(count, BLOCK_BYTES, stream.length - offset)
            if length <= 0:
                return  # the file is too short: the digest tells
            yield stream.read(offset, length)
            self._positions[split] += length
            count -= length

    def _place(self, split: str) -> tuple[Readable, int]:
        offset = self._positions[split]
        if split == "train" and self._cut:
            for name, stream in self._streams.items():
                if offset < stream.length or name == list(self._streams)[-1]:
                    return stream, offset
                offset -= stream.length
        return self._streams[split], offset


def _sources(plan: UnitPlan, index: int) -> str:
    parts = []
    for extent in plan.units[index]:
        path = plan.inputs[extent.input].path
        what = "row groups" if path.endswith(".parquet") else "bytes"
        parts.append(f"{path} ({what} {extent.begin:,} to {extent.end:,})")
    return f"unit {index}: {', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}"
