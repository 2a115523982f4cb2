"""Token writer: units appended in the order of the plan, durable with each commit, named when all are written.

At the end held-out splits without documents are cut from the tail of the train stream.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import numpy as np

from common.errors import BadInput
from common.files import replace_file, sync
from tokens.format.header import read_header
from tokens.format.manifest import (
    MANIFEST,
    SPLITS,
    Content,
    FileEntry,
    Manifest,
    RowsRecord,
    SplitRecord,
    manifest_text,
    read_content,
)
from tokens.prepare.bucket_output import BucketOutput
from tokens.prepare.commit_log import CommitLog, TailCut, Totals, Uploaded, reached
from tokens.prepare.encode_unit import Result, unit_file
from tokens.prepare.growing_files import COPY_BYTES, UNITS, GrowingStream, Shard
from tokens.prepare.plan import HASH, LARGEST_ID, TAIL, PrepareSettings, UnitPlan

COPY_TOKENS = COPY_BYTES // 2
MOST_TIMES = 10  # the share asked, of a held-out split, or less of train: beyond, whole documents split nothing
ADVICE = "add documents, or pass --split tail, which cuts the last one by tokens where it must"


class TooFewDocuments(BadInput):
    """Too few documents to hold out: no command with these settings can finish."""


def missing_splits(settings: PrepareSettings, totals: Totals) -> dict[str, float]:
    """Return the held-out splits without tokens, with their shares of the documents."""
    return {split: share for split, share in settings.held_out.items() if not totals.tokens[split]}


def copy_tail(streams: dict[str, GrowingStream], settings: PrepareSettings, totals: Totals) -> dict[str, int]:
    """Copy the tail of the train stream to the missing splits; return the final length of each split.

    Whole documents, or rows of packed conversations. A single document is cut by tokens; so is the last one of a tail
    split that would hold out far more than was asked. Raises TooFewDocuments before anything is copied.
    """
    if totals.tokens["train"] == 0:
        raise TooFewDocuments(f"every document's hash fell to a held-out split; {ADVICE}")
    train = streams["train"]
    by_tokens = settings.context_length is not None or sum(totals.documents.values()) - totals.empty_documents == 1
    try:
        lengths = _lengths(train, settings, totals, by_tokens=by_tokens)
    except TooFewDocuments:
        if by_tokens or settings.split != TAIL:
            raise
        lengths = _lengths(train, settings, totals, by_tokens=True)
    begin = lengths["train"]
    for split in missing_splits(settings, totals):
        end = begin + lengths[split]
        for start in range(begin, end, COPY_TOKENS):
            streams[split].append(io.BytesIO(train.read(start, min(end, start + COPY_TOKENS)).tobytes()))
        streams[split].sync()
        begin = end
    return lengths


def too_much_held_out(settings: PrepareSettings, lengths: dict[str, int]) -> str | None:
    """Return the problem of splits of such lengths, far from the shares that were asked, or None."""
    tokens, asked = sum(lengths.values()), settings.held_out
    for split, share in asked.items():
        if lengths[split] > MOST_TIMES * share * tokens:
            held_out = f"{lengths[split] / tokens:.1%} of the tokens, in whole documents"
            return f"--{split}-fraction {share:g} would hold out {held_out}"
    if MOST_TIMES * lengths["train"] < (1 - sum(asked.values())) * tokens:
        fractions = " and ".join(f"--{split}-fraction {share:g}" for split, share in asked.items())
        return f"{fractions} would leave {lengths['train']:,} of {tokens:,} tokens to train on"
    return None


class TokenWriter:
    """The growing token files of one directory."""

    def __init__(
        self, directory: Path, plan: UnitPlan, ranks: Path | None, log: CommitLog, bucket: BucketOutput | None
    ):
        """Continue after the commit log. Raises BadInput for too short a file. With a bucket `directory` is scratch."""
        self.directory = directory
        self.units = directory / UNITS
        self.totals = log.totals  # over all committed units
        self._bucket = bucket
        self._plan = plan
        self._ranks = ranks
        self._log = log
        to_bucket = bucket is not None
        self._streams = {split: GrowingStream(directory, split, plan.settings, to_bucket=to_bucket) for split in SPLITS}
        for split, length in (self.totals.cut or self.totals.tokens).items():
            self._streams[split].resume(length, log.path)

    def commit(self, results: list[Result]) -> None:
        """Append the next units of the plan; their tokens and the commit log are on the disk when it returns."""
        for split, stream in self._streams.items():
            paths = [unit_file(self.units, result.index, split) for result in results if split in result.parts]
            for path in paths:
                with path.open("rb") as unit:
                    stream.append(unit)
            if paths:
                stream.sync()
        reached("tokens written")
        self._log.append(*results)
        reached("ledger written")
        for result in results:
            for split in result.parts:
                unit_file(self.units, result.index, split).unlink()
                reached("unit deleted")
        if self._bucket is not None:
            self._move_full_shards(self._bucket)

    def finish(self) -> Manifest:
        """Fill missing splits from the tail, name the files, write the manifest. Raises BadInput for an empty one."""
        settings = self._plan.settings
        from_tail = list(missing_splits(settings, self.totals)) if settings.split == HASH else []
        if self._bucket is None:
            if (lengths := self.totals.cut) is None:
                lengths = copy_tail(self._streams, settings, self.totals)
                reached("tail copied")
                self._log.append(TailCut(lengths))
                reached("cut noted")
            self._streams["train"].truncate(lengths["train"])
        else:
            _refuse_missing(from_tail, settings, self.totals)
        reached("tail cut off")
        for stream in self._streams.values():
            stream.seal()
        reached("headers written")
        shards = [shard for stream in self._streams.values() for shard in stream.shards()]
        if self._bucket is not None:
            return self._publish(self._bucket, shards)
        with ThreadPoolExecutor() as threads:
            contents = list(threads.map(lambda shard: read_content(read_header(shard.path)), shards))
        manifest = self._manifest(shards, contents, from_tail)
        for shard in shards:
            shard.path.replace(self.directory / shard.name)
            reached("file named")
        sync(self.directory)
        reached("all named")
        replace_file(self.directory / MANIFEST, manifest_text(manifest), durable=True)
        reached("manifest written")
        return manifest

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _move_full_shards(self, bucket: BucketOutput) -> None:
        """Upload full shards with a checkpoint that another disk can resume from; delete them here."""
        full = [path for stream in self._streams.values() for path in stream.full_shards()]
        if not full:
            return
        for path in full:
            self._upload(bucket, path)
        bucket.checkpoint(self._streams)
        for stream in self._streams.values():
            stream.drop_full_shards()

    def _upload(self, bucket: BucketOutput, path: Path) -> None:
        self._log.append(Uploaded(path.name, bucket.upload(path)))

    def _publish(self, bucket: BucketOutput, shards: list[Shard]) -> Manifest:
        uploaded = self.totals.uploaded
        for shard in shards:
            if shard.path.name not in uploaded:
                self._upload(bucket, shard.path)
        manifest = self._manifest(shards, [uploaded[shard.path.name] for shard in shards], [])
        names = {shard.path.name: shard.name for shard in shards}
        bucket.publish(names, self._ranks, manifest_text(manifest))
        return manifest

    def _manifest(self, shards: list[Shard], contents: list[Content], from_tail: list[str]) -> Manifest:
        totals, plan, length = self.totals, self._plan, self._plan.settings.context_length
        return Manifest(
            files={
                shard.name: FileEntry(**attrs.asdict(content), tokens=shard.tokens, dtype=plan.settings.dtype.name)
                for shard, content in zip(shards, contents, strict=True)
            },
            documents=sum(totals.documents.values()),
            tokens=sum(shard.tokens for shard in shards),
            text_bytes=totals.text_bytes,
            tokenizer=plan.settings.tokenizer_record(self._ranks),
            sources=[source.record for source in plan.sources],
            split=SplitRecord(kind=plan.settings.split, seed=plan.settings.split_seed, from_tail=from_tail),
            units=totals.units,
            plan=plan.fingerprint(),
            problems=totals.problems,
            lost_documents=totals.lost_documents,
            lost_bytes=totals.lost_bytes,
            examples=totals.examples,
            rows=None if length is None else RowsRecord(length, totals.counted, totals.padding),
        )


def _lengths(train: GrowingStream, settings: PrepareSettings, totals: Totals, *, by_tokens: bool) -> dict[str, int]:
    """Return the length of each split once the missing ones are cut from the tail. Raises TooFewDocuments."""
    missing, end = missing_splits(settings, totals), totals.tokens["train"]
    documents = sum(totals.documents.values()) - totals.empty_documents
    text, whole, room = end, documents, totals.documents["train"] - totals.empty_documents
    size = settings.context_length or 1  # of packed conversations rows are cut off
    if by_tokens:
        whole = room = -(-_end_of_text(train, end, settings.end_of_text_id) // size)
        text = whole * size
    counts = {split: max(1, round(whole * share)) for split, share in missing.items()}
    if missing and sum(counts.values()) >= room:
        what = f"text of {text:,} tokens is" if by_tokens else f"{documents} documents are"
        what = f"{room:,} rows of {size:,} tokens are" if size > 1 else what
        wanted = " and ".join(f"{count} for {split}" for split, count in counts.items())
        raise TooFewDocuments(f"{what} too few to hold out {wanted}{'' if by_tokens else f'; {ADVICE}'}")
    lengths = dict(totals.tokens)
    for split in reversed(counts):  # the test split is the very end
        text = text - counts[split] * size if by_tokens else _before_documents(train, counts[split], text, settings)
        lengths[split], end = end - text, text
    lengths["train"] = end
    if not by_tokens and (problem := too_much_held_out(settings, lengths)):
        raise TooFewDocuments(f"{problem}; {ADVICE}")
    return lengths


def _before_documents(train: GrowingStream, count: int, end: int, settings: PrepareSettings) -> int:
    """Return the position of the last `count` documents of the train stream before `end`; empty ones do not count."""
    stop = end - 1  # end of text of the last one
    while stop > 0:
        begin = max(0, stop - COPY_TOKENS)
        is_end = train.read(begin, stop + 1) == settings.end_of_text_id
        found = np.flatnonzero(is_end[:-1] & ~is_end[1:])
        if len(found) >= count:
            return begin + int(found[-count]) + 1
        count, stop = count - len(found), begin
    raise AssertionError("more documents than end-of-text ids")


def _end_of_text(train: GrowingStream, end: int, end_of_text_id: int) -> int:
    """Return the end of the last document with text."""
    for stop in range(end, 0, -COPY_TOKENS):
        begin = max(0, stop - COPY_TOKENS)
        words = train.read(begin, stop).astype(np.uint32)  # of conversations an end of text may count
        found = np.flatnonzero(words & LARGEST_ID != end_of_text_id)
        if len(found):
            return begin + int(found[-1]) + 2
    return end


def _refuse_missing(missing: list[str], settings: PrepareSettings, totals: Totals) -> None:
    for split in missing:
        raise BadInput(f"no document's hash fell to {split}; pass another --output and --{split}-fraction, larger or 0")
    if not totals.tokens["train"]:
        raise BadInput("every document's hash fell to a held-out split; pass another --output and lower fractions")
    if problem := too_much_held_out(settings, totals.tokens):
        raise BadInput(f"{problem}; begin anew in a folder with --split tail, or with more documents")
