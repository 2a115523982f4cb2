"""Token writer: units appended in the order of the plan, durable with each commit, named when all are written.

Until then the files are hidden: tokens/prepare/growing_files.py. A kill at any moment loses what was not committed, and
nothing else.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import replace_file, sync
from tokens.format.contents import read_content
from tokens.format.header import read_header
from tokens.format.manifest import (
    MANIFEST,
    RANKS_FILE,
    SPLITS,
    Content,
    FileEntry,
    Manifest,
    SplitRecord,
    manifest_text,
)
from tokens.prepare.bucket_output import BucketOutput
from tokens.prepare.commit_log import CommitLog, TailCut, Totals, Uploaded, reached
from tokens.prepare.encode_unit import Result, unit_file
from tokens.prepare.growing_files import UNITS, GrowingStream, Shard
from tokens.prepare.plan import HASH, PrepareSettings, UnitPlan
from tokens.prepare.tail_split import copy_tail, missing_splits, too_much_held_out


class TokenWriter:
    """The growing token files of one directory."""

    def __init__(
        self, directory: Path, plan: UnitPlan, ranks: Path | None, log: CommitLog, bucket: BucketOutput | None
    ):
        """Continue where the commit log ends. Raises BadInput when a file is shorter than that.

        `ranks`: the tokenizer's file of byte-pair ranks; `bucket`: destination of full shards; then `directory` is
        scratch.
        """
        self.directory = directory
        self.units = directory / UNITS
        self.totals = log.totals  # over all committed units
        self._bucket = bucket
        self._plan = plan
        self._ranks = ranks
        self._log = log
        self._streams = {
            split: GrowingStream(directory, split, plan.settings, to_bucket=bucket is not None) for split in SPLITS
        }
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
        """Fill validation and test from the tail where needed, write headers, name the files, write the manifest.

        Raises BadInput where a split cannot be filled.
        """
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
        totals, plan, ranks = self.totals, self._plan, self._ranks
        if ranks is not None and self._bucket is None:  # the copy beside the tokens; a bucket gets one at the end
            ranks = self.directory / RANKS_FILE
        return Manifest(
            files={
                shard.name: FileEntry(**attrs.asdict(content), tokens=shard.tokens, dtype=plan.settings.dtype.name)
                for shard, content in zip(shards, contents, strict=True)
            },
            documents=sum(totals.documents.values()),
            tokens=sum(shard.tokens for shard in shards),
            text_bytes=totals.text_bytes,
            tokenizer=plan.settings.tokenizer_record(ranks),
            sources=[source.record for source in plan.sources],
            split=SplitRecord(kind=plan.settings.split, seed=plan.settings.split_seed, from_tail=from_tail),
            units=totals.units,
            plan=plan.fingerprint(),
            problems=totals.problems,
            lost_documents=totals.lost_documents,
            lost_bytes=totals.lost_bytes,
            examples=totals.examples,
        )


def _refuse_missing(missing: list[str], settings: PrepareSettings, totals: Totals) -> None:
    for split in missing:
        raise BadInput(
            f"no document's hash fell to {split}, and the train stream's tail is in the bucket; begin anew in another "
            f"--output with a larger --{split}-fraction, or with 0"
        )
    if not totals.tokens["train"]:
        raise BadInput(
            "every document's hash fell to a held-out split; begin anew in another --output with more documents, or "
            "with lower fractions"
        )
    if settings.version > 1 and (problem := too_much_held_out(settings, totals.tokens)):
        raise BadInput(f"{problem}; begin anew in a folder with --split tail, or with more documents")
