"""How far a token directory has come, and whether it still holds what was written."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from errors import BadInput
from files import BLOCK_BYTES
from tokens.ledger import LEDGER, read_ledger, read_results
from tokens.manifest import MANIFEST, open_listed, read_contents, read_manifest
from tokens.splits import SPLITS
from tokens.token_file import TokenStream, open_split
from tokens.unit_plan import UnitPlan, read_plan


def status(directory: Path) -> list[str]:
    """Return how far a preparation has come, as lines. Raises BadInput where there is none."""
    plan = read_plan(directory)
    if plan is None:
        raise BadInput(f"{directory}: no plan.json; prepare_data.py SOURCE... --output {directory} begins one")
    totals, _ = read_ledger(directory)
    done, total = sum(plan.unit_bytes[: totals.units]), sum(plan.unit_bytes)
    tokens, documents = sum(totals.tokens.values()), sum(totals.documents.values())
    if (directory / MANIFEST).exists():
        state = "complete"
    else:
        age = time.time() - (directory / LEDGER).stat().st_mtime if (directory / LEDGER).exists() else 0
        state = f"not complete, last commit {age:.0f} s ago; the same command goes on"
    lines = [
        f"{directory}: {state}",
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


def verify(directory: Path) -> list[str]:
    """Read every token file against the manifest. Raises BadInput naming what is damaged, and what it was made from."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadInput(f"{directory / MANIFEST}: missing; only a finished preparation has one")
    splits = [split for split in SPLITS if any(name.startswith(split) for name in manifest.files)]
    streams = {split: open_listed(directory, split, manifest) for split in splits}
    try:
        contents = read_contents([file for stream in streams.values() for file in stream.files], manifest)
    except BadInput as error:
        damaged = _damaged_unit(directory)
        if damaged is None:
            raise
        raise BadInput(f"{error}; damaged: {damaged}") from error
    size = sum(content.size_bytes for content in contents.values())
    return [f"{directory}: {len(contents)} files, {size:,} bytes: all as written"]


def _damaged_unit(directory: Path) -> str | None:
    """Return which unit's tokens are not those of the ledger, and what they were made from."""
    import xxhash

    plan = read_plan(directory)
    if plan is None:
        return None
    _, cut = read_ledger(directory)
    tokens = _Tokens(directory, cut is not None)
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

    def __init__(self, directory: Path, cut: bool):
        self._cut = cut
        self._streams: dict[str, TokenStream] = {}
        for split in SPLITS:
            if any(directory.glob(f"{split}*.safetensors")):
                self._streams[split] = open_split(directory, split)
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

    def _place(self, split: str) -> tuple[TokenStream, int]:
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
