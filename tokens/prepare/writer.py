"""Units to token files: appended in the order of the plan, durable with each commit, named when all of it is there.

Until then the files are hidden: see `tokens.shards`. A kill at any moment loses what was not committed, and nothing
else.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput
from common.files import replace_file, sha256, sync
from tokens.format.manifest import MANIFEST, manifest_text, read_content
from tokens.format.splits import SPLITS, SplitRule
from tokens.format.token_file import read_header
from tokens.prepare.commit_log import CommitLog, Totals
from tokens.prepare.encode_unit import Result, unit_file
from tokens.prepare.growing_files import GrowingStream, Shard
from tokens.prepare.s3_output import Bucket
from tokens.prepare.tail_split import copy_tail, missing_splits
from tokens.tokenizer.tokenizer import RANKS_FILE, Tokenizer, fingerprint, token_dtype

CRASH_POINTS = (
    "tokens written",
    "ledger written",
    "unit deleted",
    "tail copied",
    "cut noted",
    "tail cut off",
    "headers written",
    "file named",
    "all named",
    "manifest written",
)  # of a commit and of the end, in order


def reached(point: str) -> None:
    """Do nothing at a moment of the work: where tests end the process."""
    assert point in CRASH_POINTS, point


@attrs.frozen(kw_only=True)
class WritePosition:
    """Where token files grow, and in what pieces."""

    directory: Path
    units: Path  # what workers have computed
    shard_tokens: int | None  # of each file but the last; None: one file a split
    bucket: Bucket | None  # which full shards go to


class TokenWriter:
    """The growing token files of one directory."""

    def __init__(self, place: WritePosition, tokenizer: Tokenizer, ledger: CommitLog):
        """Continue where the ledger ends. Raises BadInput when a file is shorter than that."""
        self.directory = place.directory
        self._units = place.units
        self._bucket = place.bucket
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._dtype = token_dtype(tokenizer.vocabulary_size).newbyteorder("<")
        self._streams = {
            split: GrowingStream(place.directory, split, self._dtype, place.shard_tokens) for split in SPLITS
        }
        for split, length in (ledger.cut or ledger.totals.tokens).items():
            if place.bucket is None:
                self._streams[split].go_on(length, ledger.path)
            else:
                tail = place.bucket.tails.get(split, np.empty(0, self._dtype))
                self._streams[split].go_on_elsewhere(length, tail)

    @property
    def totals(self) -> Totals:
        """Sums over what is committed."""
        return self._ledger.totals

    def commit(self, results: list[Result]) -> None:
        """Append units, the next ones of the plan; their tokens and the ledger are on the disk when it returns."""
        for split, stream in self._streams.items():
            paths = [unit_file(self._units, result.index, split) for result in results if split in result.parts]
            for path in paths:
                with path.open("rb") as unit:
                    stream.append(unit)
            if paths:
                stream.sync()
        reached("tokens written")
        self._ledger.append(results)
        reached("ledger written")
        for result in results:
            for split in result.parts:
                unit_file(self._units, result.index, split).unlink()
                reached("unit deleted")
        if self._bucket is not None:
            self._hand_over(self._bucket)

    def finish(self, rule: SplitRule, description: dict[str, Any]) -> dict[str, Any]:
        """Cut off what is missing of validation and test, write headers and manifest, give the files their names.

        Returns the manifest, `description` included. Raises BadInput where a split cannot be filled.
        """
        if self._bucket is None:
            self._streams["train"].truncate((self._ledger.cut or self._cut(rule))["train"])
        else:
            _refuse_missing(rule, self._ledger.totals)
        reached("tail cut off")
        for stream in self._streams.values():
            stream.seal()
        reached("headers written")
        shards = [shard for stream in self._streams.values() for shard in stream.shards()]
        if self._bucket is not None:
            return self._publish(self._bucket, shards, description)
        with ThreadPoolExecutor() as threads:
            contents = list(threads.map(lambda shard: attrs.asdict(read_content(read_header(shard.path))), shards))
        manifest = self._manifest(self._entries(shards, contents), description)
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

    def _hand_over(self, bucket: Bucket) -> None:
        """Put full shards into the bucket, and what is needed to go on without this disk; drop them here."""
        full = [path for stream in self._streams.values() for path in stream.here()]
        if not full:
            return
        for path in full:
            self._upload(bucket, path)
        tails = {}
        for split, stream in self._streams.items():
            begin = bucket.begin_of_tail(split, stream.full)
            tails[split] = (begin, stream.tail(begin))
        bucket.checkpoint(tails)
        for stream in self._streams.values():
            stream.drop()

    def _upload(self, bucket: Bucket, path: Path) -> None:
        self._ledger.append_uploaded(path.name, attrs.asdict(bucket.upload(path)))

    def _publish(self, bucket: Bucket, shards: list[Shard], description: dict[str, Any]) -> dict[str, Any]:
        for shard in shards:
            if shard.path.name not in self._ledger.uploaded:
                self._upload(bucket, shard.path)
        contents = [self._ledger.uploaded[shard.path.name] for shard in shards]
        manifest = self._manifest(self._entries(shards, contents), description)
        names = {shard.path.name: shard.name for shard in shards}
        bucket.publish(names, self._tokenizer.ranks_file, manifest_text(manifest))
        return manifest

    def _ranks(self) -> dict[str, str | None]:
        """Return what the manifest says of the byte-pair ranks."""
        ranks = self._tokenizer.ranks_file
        if ranks is None:
            return {"ranks_file": None}
        return {"ranks_file": RANKS_FILE, "ranks_sha256": sha256(self._here(ranks))}

    def _here(self, ranks: Path) -> Path:
        """Return the copy of the ranks beside the tokens; for a bucket, which gets one at the end, the ranks."""
        return self.directory / RANKS_FILE if self._bucket is None else ranks

    def _cut(self, rule: SplitRule) -> dict[str, int]:
        lengths = copy_tail(self._streams, rule, self._ledger.totals, self._tokenizer.end_of_text_id)
        reached("tail copied")
        self._ledger.append_cut(lengths)
        reached("cut noted")
        return lengths

    def _entries(self, shards: list[Shard], contents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what the manifest says of each file, by its name."""
        return {
            shard.name: {**content, "tokens": shard.tokens, "dtype": self._dtype.name}
            for shard, content in zip(shards, contents, strict=True)
        }

    def _manifest(self, files: dict[str, dict[str, Any]], description: dict[str, Any]) -> dict[str, Any]:
        totals = self._ledger.totals
        return {
            "files": files,
            "documents": sum(totals.documents.values()),
            "tokens": sum(entry["tokens"] for entry in files.values()),
            "text_bytes": totals.text_bytes,
            "tokenizer": {
                "name": self._tokenizer.name,
                "vocabulary_size": self._tokenizer.vocabulary_size,
                "end_of_text_id": self._tokenizer.end_of_text_id,
                "fingerprint": fingerprint(self._tokenizer),  # of what it does
                **self._ranks(),
            },
            **description,
        }


def _refuse_missing(rule: SplitRule, totals: Totals) -> None:
    for split in missing_splits(rule, totals):
        raise BadInput(
            f"no document's hash fell to {split}, and the train stream's tail is in the bucket; begin anew in another "
            f"--output with a larger --{split}-fraction, or with 0"
        )
    if not totals.tokens["train"]:
        raise BadInput(
            "every document's hash fell to a held-out split; begin anew in another --output with more documents, or "
            "with lower fractions"
        )
