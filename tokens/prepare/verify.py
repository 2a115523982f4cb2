"""Status and verification of a token directory, in a folder or a bucket."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import xxhash

from common.bucket import Bucket
from common.errors import BadInput
from common.files import BLOCK_BYTES
from common.json_files import open_regular, utc_time
from common.remote_files import REMOTE, THREADS, look_up_remote
from common.text import counted
from tokens.format.header import HEADER_BYTES
from tokens.format.manifest import MANIFEST, PLAN, SPLITS, Manifest, check_file, check_sha256, read_manifest, split_of
from tokens.prepare.bucket_output import BucketOutput
from tokens.prepare.commit_log import COMMITS, SHOWN, Totals, entries_after, read_log
from tokens.prepare.encode_unit import Result
from tokens.prepare.plan import UnitPlan, read_plan


class Slice(NamedTuple):
    """A byte range of the token data in a file or object: from `begin` up to, but not including, `end`."""

    path: str
    begin: int
    end: int


def status(where: str) -> list[str]:
    """Return lines about the progress of a preparation. Raises BadInput if a folder or bucket has no preparation."""
    with _described_directory(where) as directory:
        plan = read_plan(directory)
        if plan is None:
            raise BadInput(
                f"{where}: has no {PLAN}; to start a preparation, run prepare_data.py SOURCE... --output {where}"
            )
        totals = read_log(directory)
        if read_manifest(directory) is not None:
            state = "complete"
        else:
            ledger = directory / COMMITS
            when = f"at {utc_time(ledger.stat().st_mtime)} by the disk's clock" if ledger.exists() else "none"
            state = f"not complete, last commit {when}; rerun the same command to resume it"
    done, total = sum(plan.unit_bytes[: totals.units]), sum(plan.unit_bytes)
    tokens, documents = sum(totals.tokens.values()), sum(totals.documents.values())
    lines = [
        f"{where}: {state}",
        f"  units      {totals.units:,} of {len(plan.units):,} ({done / max(1, total):.1%} of {total:,} bytes)",
        f"  tokens     {tokens:,} in {counted(documents, 'document')}",
    ]
    lengths = totals.cut or totals.tokens
    for split in [split for split in SPLITS if lengths[split]]:
        # If the tail of train was cut off, it is not known how many documents of train are left.
        is_unchanged = lengths[split] == totals.tokens[split]
        document_text = f", {counted(totals.documents[split], 'document')}" if is_unchanged else ""
        lines.append(f"  {split:10} {counted(lengths[split], 'token')}{document_text}")
    if totals.problems:
        lines.append(f"  problems   {json.dumps(totals.problems)}, {counted(totals.lost_documents, 'document')} lost")
        lines += [f"    {line}" for line in itertools.chain.from_iterable(totals.examples.values())]
    return lines


def verify(where: str) -> list[str]:
    """Check the files in a folder or bucket against the manifest.

    If files are damaged, raises BadInput with their names and with the sources of the damaged tokens.
    """
    with _described_directory(where) as directory:
        manifest = read_manifest(directory)
        if manifest is None:
            raise BadInput(f"{where}: has no {MANIFEST}; only a finished preparation has one")
        plan = read_plan(directory)
        damaged = _damaged_files(directory, Bucket(where) if REMOTE in where else None, manifest)
        units = []
        # Checking the units of a bucket would read the bucket a second time, so it is done only if a file is damaged.
        if plan is not None and (damaged or REMOTE not in where):
            if plan.fingerprint() != manifest.plan:
                damaged.append(f"{where}/{PLAN}: is not the plan that {MANIFEST} names")
            try:
                units = list(itertools.islice(_damaged_units(where.rstrip("/"), directory, plan, manifest), SHOWN))
            except BadInput as error:  # the ledger is damaged
                damaged.append(str(error))
            if units and not damaged:
                damaged = [f"{where}/{COMMITS}: damaged: {units[0]}: the recorded digest does not match these tokens"]
    if damaged:
        origin = f"; damaged: {'; '.join(units)}" if units else ""
        remaining = f" (and {len(damaged) - SHOWN} more)" if len(damaged) > SHOWN else ""
        raise BadInput(f"{'; '.join(damaged[:SHOWN])}{remaining}{origin}")
    size = sum(content.size_bytes for content in manifest.files.values())
    return [f"{where}: {len(manifest.files)} files, {size:,} bytes: all unchanged"]


@contextmanager
def _described_directory(where: str) -> Iterator[Path]:
    """Provide a folder with plan, commit log and manifest: the token directory, or copies of a bucket's files."""
    if REMOTE not in where:
        yield Path(where)
        return
    with TemporaryDirectory() as folder:
        try:
            BucketOutput(where, Path(folder)).describe()
            yield Path(folder)
        except BadInput as error:
            raise BadInput(str(error).replace(folder, where)) from error


def _damaged_files(directory: Path, bucket: Bucket | None, manifest: Manifest) -> list[str]:
    """Return a line for each file or object that differs from its manifest entry. Several files are read at once."""

    def problem(name: str) -> str | None:
        try:
            if bucket is None:
                check_file(directory / name, manifest)
            else:
                check_sha256(f"{bucket.url}/{name}", bucket.sha256(name), manifest.files[name].sha256)
        except BadInput as error:
            return str(error)
        return None

    names = {*manifest.files, *(path.name for path in directory.glob("*.safetensors"))}
    with ThreadPoolExecutor(THREADS) as threads:
        return [line for line in threads.map(problem, sorted(filter(split_of, names))) if line is not None]


def _damaged_units(where: str, directory: Path, plan: UnitPlan, manifest: Manifest) -> Iterator[str]:
    """Describe each unit whose tokens in `where` do not match the digest in the commit log. Also name its sources."""
    if plan.settings.template is not None:  # the digest was computed from words of the growing files
        return
    log, item_bytes = read_log(directory), plan.settings.dtype.itemsize
    files = _slices_by_split(where, log, manifest, item_bytes)
    begins = dict.fromkeys(SPLITS, 0)  # tokens
    for entry, _ in entries_after(directory / COMMITS, 0):
        if not isinstance(entry, Result):
            continue
        for split, part in entry.parts.items():
            begin, end = begins[split], begins[split] + part.tokens
            begins[split] = end
            digest = xxhash.xxh3_128()
            for data in _read(_between(files[split], begin * item_bytes, end * item_bytes)):
                digest.update(data)
            if digest.hexdigest() != part.digest:
                yield f"tokens {begin:,} to {end:,} of {split}, made from {_sources(plan, entry.index)}"


def _slices_by_split(where: str, log: Totals, manifest: Manifest, item_bytes: int) -> dict[str, list[Slice]]:
    """For each split, return the slices, in order, that now contain the tokens that units wrote for this split.

    At the end of a preparation, a held-out split may have received tokens from the end of train, or may have lost its
    last tokens to train.
    """
    files: dict[str, list[Slice]] = {}
    for split in SPLITS:
        names = sorted(name for name in manifest.files if split_of(name) == split)
        files[split] = [Slice(f"{where}/{name}", 0, manifest.files[name].tokens * item_bytes) for name in names]
    if log.cut is None:
        return files
    written_bytes = {split: count * item_bytes for split, count in log.tokens.items()}
    # `after` contains the complete train stream, with the end that was cut off. `returned` contains the tokens that
    # held-out splits lost to train.
    after, returned = [*files["train"]], dict[str, list[Slice]]()
    for split in SPLITS[1:]:
        after += _between(files[split], written_bytes[split], log.cut[split] * item_bytes)
    begin = written_bytes["train"]
    for split in SPLITS[1:]:
        end = begin + max(0, written_bytes[split] - log.cut[split] * item_bytes)
        returned[split], begin = _between(after, begin, end), end
    held_out = {split: _between(files[split], 0, written_bytes[split]) + returned[split] for split in SPLITS[1:]}
    return {"train": _between(after, 0, written_bytes["train"]), **held_out}


def _between(slices: list[Slice], begin: int, end: int) -> list[Slice]:
    """Take the slices as one sequence of bytes. Return slices of its part from byte `begin` up to byte `end`.

    Byte `end` is not included.
    """
    selected, position = [], 0
    for piece in slices:
        first, last = max(begin, position), min(end, position + piece.end - piece.begin)
        if first < last:
            selected.append(Slice(piece.path, piece.begin + first - position, piece.begin + last - position))
        position += piece.end - piece.begin
    return selected


def _read(slices: list[Slice]) -> Iterator[bytes]:
    """Yield the bytes of slices, or fewer if a file was truncated."""
    for path, begin, end in slices:
        with suppress(OSError, BadInput):
            opened = look_up_remote(path).open() if REMOTE in path else open_regular(Path(path))
            with opened as file:
                file.seek(HEADER_BYTES + begin)
                missing = end - begin
                while missing and (data := file.read(min(missing, BLOCK_BYTES))):
                    missing -= len(data)
                    yield data


def _sources(plan: UnitPlan, index: int) -> str:
    parts = []
    for extent in plan.units[index] if index < len(plan.units) else ():
        path = plan.inputs[extent.input].path
        unit = "row groups" if path.endswith(".parquet") else "bytes"
        parts.append(f"{path} ({unit} {extent.begin:,} to {extent.end:,})")
    return f"unit {index}: {', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}"
