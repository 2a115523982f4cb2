"""Token writer: append units in the order of the plan, make each commit durable, and name the files at the end.

If a held-out split misses its requested share at the end, tokens are moved between this split and the end of train.
"""

import io
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import numpy as np

from common.errors import BadInput
from common.files import replace_file, sync
from common.output import note, show
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
from tokens.prepare.commit_log import CommitLog, TailCut, Totals, Uploaded, entries_after, reached
from tokens.prepare.encode_unit import Result, unit_file
from tokens.prepare.growing_files import COPY_BYTES, UNITS, GrowingStream, Shard
from tokens.prepare.plan import HASH, LARGEST_ID, TAIL, PrepareSettings, UnitPlan, is_steady

COPY_TOKENS = COPY_BYTES // 2
ADVICE = "add documents, or pass --split tail, which divides a document if necessary"


class TooFewDocuments(BadInput):
    """There are too few documents to hold some out, so no command with these settings can finish."""


def missing_splits(settings: PrepareSettings, totals: Totals) -> dict[str, float]:
    """Return the requested share of the documents for each held-out split that has no tokens."""
    return {split: share for split, share in settings.held_out.items() if not totals.tokens[split]}


def final_lengths(train: GrowingStream, settings: PrepareSettings, totals: Totals) -> dict[str, int]:
    """Return the number of tokens that each split will have: between half and twice its requested share.

    A held-out split without documents gets whole documents from the end of the train stream. The hash may have selected
    no document for this split, and with --split tail all held-out splits begin empty. If whole documents would miss a
    share by more than a factor of LARGEST_FACTOR, the splits are cut by tokens instead, if necessary inside a document.
    Packed conversations are always cut by rows. Raises TooFewDocuments.
    """
    if totals.tokens["train"] == 0:
        raise TooFewDocuments(f"the hash selected every document for a held-out split; {ADVICE}")
    by_tokens = settings.context_length is not None or sum(totals.documents.values()) - totals.empty_documents == 1
    if not by_tokens:
        try:
            lengths = _whole_documents(train, settings, totals)
            if not settings.short_splits(lengths) and not settings.long_splits(lengths):
                return lengths
        except TooFewDocuments:
            if settings.split != TAIL:
                raise
        splits = " and ".join(settings.held_out)
        show(note(f"whole documents would miss the requested shares, so {splits} may begin or end inside a document"))
    return _cut_by_tokens(train, settings, totals)


def move_tokens(streams: dict[str, GrowingStream], totals: Totals, lengths: dict[str, int]) -> None:
    """Copy tokens from the ends of streams to other streams, so that each split can then be cut to its final length.

    The excess of a held-out split goes to the end of the train stream. Held-out splits that need tokens
    take them from that end.
    """
    train, held_out = streams["train"], SPLITS[1:]
    for split in held_out:
        _copy(streams[split], lengths[split], totals.tokens[split], train)
    begin = lengths["train"]
    for split in held_out:
        end = begin + max(0, lengths[split] - totals.tokens[split])
        _copy(train, begin, end, streams[split])
        begin = end


class TokenWriter:
    """The growing token files of one directory."""

    def __init__(
        self, directory: Path, plan: UnitPlan, ranks: Path | None, log: CommitLog, bucket: BucketOutput | None
    ):
        """Continue where the commit log ends. Raises BadInput if a file is too short.

        With a bucket, `directory` contains only scratch files.
        """
        self.directory = directory
        self.units = directory / UNITS
        self.totals = log.totals  # sums over all committed units
        self._bucket = bucket
        self._plan = plan
        self._ranks = ranks
        self._log = log
        to_bucket = bucket is not None
        self._streams = {split: GrowingStream(directory, split, plan.settings, to_bucket=to_bucket) for split in SPLITS}
        for split, length in (self.totals.cut or self.totals.tokens).items():
            self._streams[split].resume(length, log.path)

    def commit(self, results: list[Result]) -> None:
        """Append the next units of the plan, and return when their tokens and the commit log are on the disk."""
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
        """Fill missing splits from the end of train, name the files, and write the manifest.

        Raises BadInput if a split would be empty.
        """
        settings = self._plan.settings
        if self._bucket is None:
            if (lengths := self.totals.cut) is None:
                lengths = final_lengths(self._streams["train"], settings, self.totals)
                self._refuse_if_followed(lengths)
                move_tokens(self._streams, self.totals, lengths)
                reached("tail copied")
                self._log.append(TailCut(lengths))
                reached("cut noted")
            for split, length in lengths.items():
                if length < self._streams[split].length:
                    self._streams[split].truncate(length)
        else:
            _refuse_shares(settings, self.totals)
        reached("tail cut off")
        for stream in self._streams.values():
            stream.seal()
        reached("headers written")
        shards = [shard for stream in self._streams.values() for shard in stream.shards()]
        if self._bucket is not None:
            return self._publish(self._bucket, shards)
        with ThreadPoolExecutor() as threads:
            contents = list(threads.map(lambda shard: read_content(read_header(shard.path)), shards))
        manifest = self._manifest(shards, contents)
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

    def _refuse_if_followed(self, lengths: dict[str, int]) -> None:
        """Raise TooFewDocuments if the train stream would lose tokens that a run may have read already.

        Runs with `train.py --follow` read the train stream while it grows.
        """
        settings = self._plan.settings
        if settings.split != HASH or lengths["train"] >= self.totals.tokens["train"]:
            return
        totals = Totals()
        for entry, _ in entries_after(self._log.path, 0):
            totals.add(entry)
            if is_steady(settings, totals.tokens):
                splits = " and ".join(settings.short_splits(self.totals.tokens))
                raise TooFewDocuments(f"the hash selected less than half of the requested share for {splits}; {ADVICE}")

    def _move_full_shards(self, bucket: BucketOutput) -> None:
        """Upload the full shards and a checkpoint from which any machine can resume. Then delete the local shards."""
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
        manifest = self._manifest(shards, [uploaded[shard.path.name] for shard in shards])
        names = {shard.path.name: shard.name for shard in shards}
        bucket.publish(names, self._ranks, manifest_text(manifest))
        return manifest

    def _manifest(self, shards: list[Shard], contents: list[Content]) -> Manifest:
        totals, plan, length = self.totals, self._plan, self._plan.settings.context_length
        final = totals.cut or totals.tokens
        hashed = plan.settings.held_out if plan.settings.split == HASH else {}
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
            split=SplitRecord(
                kind=plan.settings.split,
                seed=plan.settings.split_seed,
                from_tail=[split for split in hashed if final[split] > totals.tokens[split]],
                shortened=[split for split in hashed if final[split] < totals.tokens[split]],
            ),
            units=totals.units,
            plan=plan.fingerprint(),
            problems=totals.problems,
            lost_documents=totals.lost_documents,
            lost_bytes=totals.lost_bytes,
            examples=totals.examples,
            rows=None if length is None else RowsRecord(length, totals.counted, totals.padding),
        )


def _whole_documents(train: GrowingStream, settings: PrepareSettings, totals: Totals) -> dict[str, int]:
    """Return the length of each split after missing splits have received documents from the end of train.

    Raises TooFewDocuments.
    """
    missing, end = missing_splits(settings, totals), totals.tokens["train"]
    documents = sum(totals.documents.values()) - totals.empty_documents
    counts = {split: max(1, round(documents * share)) for split, share in missing.items()}
    if missing and sum(counts.values()) >= totals.documents["train"] - totals.empty_documents:
        held_out = " and ".join(f"{count} for {split}" for split, count in counts.items())
        raise TooFewDocuments(f"{documents} documents are too few to hold out {held_out}; {ADVICE}")
    lengths = dict(totals.tokens)
    for split in reversed(counts):  # the test split is at the very end
        begin = _before_documents(train, counts[split], end, settings)
        lengths[split], end = end - begin, begin
    lengths["train"] = end
    return lengths


def _cut_by_tokens(train: GrowingStream, settings: PrepareSettings, totals: Totals) -> dict[str, int]:
    """Return the length of each split after a cut by tokens, or by rows of conversations. Raises TooFewDocuments."""
    total, size = sum(totals.tokens.values()), settings.context_length or 1
    missing, lengths = missing_splits(settings, totals), dict(totals.tokens)
    changed = {*missing, *settings.short_splits(lengths), *settings.long_splits(lengths)}
    text_end = _end_of_text(train, totals.tokens["train"], settings.end_of_text_id)
    # Empty documents at the very end go to the last split. If all held-out splits are cut from the end, these documents
    # do not count toward the shares.
    counted_tokens = text_end if len(missing) == len(settings.held_out) else total
    requested_lengths = {
        split: max(1, round(-(-counted_tokens // size) * share)) * size
        for split, share in settings.held_out.items()
        if split in changed
    }
    for split in [split for split in requested_lengths if split not in missing]:
        lengths["train"] += lengths[split] - requested_lengths[split]
        lengths[split] = requested_lengths.pop(split)
    end, text_end = lengths["train"], -(-text_end // size) * size
    if end != totals.tokens["train"]:  # the end of the stream has moved, so `text_end` is out of date
        text_end = end
    if requested_lengths and sum(requested_lengths.values()) >= text_end:
        held_out = " and ".join(f"{count // size} for {split}" for split, count in requested_lengths.items())
        rows = f"{text_end // size:,} rows of {size:,} tokens are too few"
        text = rows if size > 1 else f"a text of {text_end:,} tokens is too short"
        raise TooFewDocuments(f"{text} to hold out {held_out}")
    for split in reversed(requested_lengths):  # the test split is at the very end
        begin = text_end - requested_lengths[split]
        lengths[split], end, text_end = end - begin, begin, begin
    lengths["train"] = end
    _refuse_lengths(settings, lengths, size)
    return lengths


def _refuse_lengths(settings: PrepareSettings, lengths: dict[str, int], size: int) -> None:
    """Raise TooFewDocuments if a text is too short for the requested shares, even if documents may be divided."""
    total = sum(lengths.values())
    for split in [*settings.long_splits(lengths), *settings.short_splits(lengths)]:
        least = math.ceil(1000 * size / total) / 1000
        unit = f"row of {size:,} tokens" if size > 1 else "token"
        got = f"a single {unit} is already {size / total:.1%} of the {total:,} tokens"
        where = f"--{split}-fraction {settings.held_out[split]:g}"
        advice = f"pass a --{split}-fraction of 0 or of at least {least:g}, or add documents"
        raise TooFewDocuments(f"{where}: {got}; {advice}")


def _before_documents(train: GrowingStream, count: int, end: int, settings: PrepareSettings) -> int:
    """Return the position in the train stream at which the last `count` non-empty documents before `end` begin."""
    stop = end - 1  # end-of-text id of the last document
    while stop > 0:
        begin = max(0, stop - COPY_TOKENS)
        is_end = train.read(begin, stop + 1) == settings.end_of_text_id
        text_ends = np.flatnonzero(is_end[:-1] & ~is_end[1:])
        if len(text_ends) >= count:
            return begin + int(text_ends[-count]) + 1
        count, stop = count - len(text_ends), begin
    raise AssertionError("more documents than end-of-text ids")


def _end_of_text(train: GrowingStream, end: int, end_of_text_id: int) -> int:
    """Return the end of the last document with text."""
    for stop in range(end, 0, -COPY_TOKENS):
        begin = max(0, stop - COPY_TOKENS)
        words = train.read(begin, stop).astype(np.uint32)  # in conversations, a word also holds a weight
        text_positions = np.flatnonzero(words & LARGEST_ID != end_of_text_id)
        if len(text_positions):
            return begin + int(text_positions[-1]) + 2
    return end


def _copy(source: GrowingStream, begin: int, end: int, target: GrowingStream) -> None:
    """Append tokens of `source` to `target`: from position `begin` up to, but not including, `end`.

    Returns when the tokens are on the disk.
    """
    for start in range(begin, end, COPY_TOKENS):
        target.append(io.BytesIO(source.read(start, min(end, start + COPY_TOKENS)).tobytes()))
    if end > begin:
        target.sync()


def _refuse_shares(settings: PrepareSettings, totals: Totals) -> None:
    """Raise BadInput if splits in a bucket are far from their requested shares.

    In a bucket, tokens cannot be moved from one split to another at the end, as they can in a folder.
    """
    advice = "start over with more documents, or write to a local folder and pass --split tail"
    if not totals.tokens["train"]:
        raise BadInput(
            "the hash selected every document for a held-out split; pass another --output and lower fractions"
        )
    total = sum(totals.tokens.values())
    for split in missing_splits(settings, totals):
        raise BadInput(
            f"the hash selected no document for {split}; pass another --output, and either increase --{split}-fraction "
            "or set it to 0"
        )
    for split in [*settings.long_splits(totals.tokens), *settings.short_splits(totals.tokens)]:
        share = f"--{split}-fraction {settings.held_out[split]:g}"
        raise BadInput(f"{share} would hold out {totals.tokens[split] / total:.1%} of the tokens; {advice}")
