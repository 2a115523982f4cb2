"""Bucket output: token files that grow in a bucket, so that a preparation can be resumed on any machine.

These objects are below the prefix while the files grow. Each exists completely or not at all:

    plan.json                           as in a token directory
    .partial-train-00000.safetensors    full shards, whose upload was verified
    .checkpoint-00000000.safetensors    a commit: new lines of the log, and new tokens that follow the full shards

Only the bucket's content counts. At the start, the scratch folder is emptied and filled from the bucket, on any
machine. At the end, the server copies each shard to its final name. A finished prefix is a token directory like any
other.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from common.bucket import Bucket, StoredObject, VersionConflict
from common.errors import BadInput, refusing
from common.files import naming, replace_file
from common.remote_files import THREADS
from tokens.format.header import HEADER_BYTES, read_header
from tokens.format.manifest import MANIFEST, PLAN, RANKS_FILE, Content, Manifest, parse_manifest, read_content
from tokens.prepare.commit_log import COMMITS, reached
from tokens.prepare.growing_files import PARTIAL, GrowingStream, partial_files, partial_path
from tokens.prepare.plan import UnitPlan, read_plan

CHECKPOINT = ".checkpoint-"
IN_USE = "another process is preparing these tokens; wait for it, or stop it"


class BucketOutput:
    """A token directory in a bucket, and its scratch folder on this disk."""

    def __init__(self, url: str, scratch: Path):
        self.url = url.rstrip("/")
        self._scratch = scratch
        self._bucket = Bucket(url)
        self._checkpoints = 0
        self._log_bytes = 0  # bytes of the log that are in checkpoints
        self._lengths: dict[str, int] = {}  # tokens of each split that are in shards and checkpoints

    def open(self) -> Manifest | None:
        """Empty the scratch folder and fetch the plan. Return the manifest if the tokens are finished.

        Raises BadInput if the bucket contains something else, or if a file is missing.
        """
        self._empty_scratch()
        names = self._objects()
        if PLAN in names:
            replace_file(self._scratch / PLAN, self._read(PLAN))
        elif names:
            raise BadInput(f"{self.url}/{min(names)}: exists, but there is no {PLAN}; pass another --output")
        if MANIFEST not in names:
            return None
        with refusing(f"{self.url}/{MANIFEST}: damaged", "start over in another --output"):
            manifest = parse_manifest(self._read(MANIFEST))
        for name in () if manifest is None else manifest.files:
            if name not in names:
                raise BadInput(f"{self.url}/{name}: missing, but {MANIFEST} lists it; start over in another --output")
        return manifest

    def describe(self) -> None:
        """Copy the plan, commit log, manifest and ranks to the scratch folder. Files that do not exist are skipped."""
        names = self._objects()
        for name in sorted(names.keys() & {PLAN, COMMITS, MANIFEST, RANKS_FILE}):
            replace_file(self._scratch / name, self._read(name))
        plan = read_plan(self._scratch)
        if plan is None or COMMITS in names or plan.settings.shard_tokens is None:
            return
        self.restore(plan)
        if self._checkpoints:
            written_at = names[_checkpoint(self._checkpoints - 1)].written_at
            os.utime(self._scratch / COMMITS, (written_at, written_at))

    def begin(self) -> None:
        self._create(PLAN, (self._scratch / PLAN).read_bytes())
        reached("plan uploaded")

    def restore(self, plan: UnitPlan) -> None:
        """Fetch the commit log, and the shards that are not full, from the checkpoints.

        Raises BadInput if a checkpoint is missing.
        """
        assert plan.settings.shard_tokens is not None
        names = sorted(name for name in self._objects() if name.startswith(CHECKPOINT))
        if missing_names := {*map(_checkpoint, range(len(names)))} - {*names}:
            raise BadInput(f"{self.url}/{min(missing_names)}: missing, although later files exist; use a new --output")
        log_path = self._scratch / COMMITS
        with naming(log_path), log_path.open("wb") as log, ThreadPoolExecutor(THREADS) as threads:
            for data in threads.map(self._read, names):
                tensors = load(data)
                log.write(tensors.pop("ledger").tobytes())
                begins = {key.removesuffix(" begin"): tensors.pop(key) for key in list(tensors) if " " in key}
                for split, tokens in tensors.items():
                    shard, inside = divmod(int(begins[split][0]), plan.settings.shard_tokens)
                    path = partial_path(self._scratch, split, shard, plan.settings)
                    # Several checkpoints may begin a shard without adding tokens, so the shard is not opened with "xb".
                    with naming(path), path.open("ab" if inside else "wb") as file:
                        file.write((b"" if inside else bytes(HEADER_BYTES)) + tokens.tobytes())
                    self._lengths[split] = int(begins[split][0]) + len(tokens)
            self._log_bytes = log.tell()
        self._checkpoints = len(names)
        if not names:
            (self._scratch / COMMITS).unlink()

    def upload(self, path: Path) -> Content:
        """Upload a full shard, and return its `Content`."""
        content = read_content(read_header(path))
        self._bucket.upload_verified(path, content.sha256)
        reached("shard uploaded")
        return content

    def checkpoint(self, streams: dict[str, GrowingStream]) -> None:
        """Commit the new lines of the log, and the new tokens that follow the full shards.

        The full shards must be in the bucket already.
        """
        with (self._scratch / COMMITS).open("rb") as file:
            file.seek(self._log_bytes)
            lines = file.read()
        tensors = {"ledger": np.frombuffer(lines, np.uint8)}
        for split, stream in streams.items():
            stream.sync()
            begin = max(stream.full, self._lengths.get(split, 0))
            tensors |= {split: stream.read(begin, stream.length), f"{split} begin": np.array([begin])}
            self._lengths[split] = stream.length
        self._create(_checkpoint(self._checkpoints), save(tensors))
        self._checkpoints += 1
        self._log_bytes += len(lines)
        reached("checkpoint written")

    def publish(self, names: dict[str, str], ranks: Path | None, manifest: str) -> None:
        """Copy shards from their hidden names to their final names, write log and manifest, and delete leftovers.

        `names` maps hidden names to final names.
        """
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(self._bucket.copy, names.keys(), names.values()):
                reached("shard named")
        objects = self._objects()
        for name, final in names.items():
            size_bytes, expected_bytes = objects[final].size_bytes, objects[name].size_bytes
            if size_bytes != expected_bytes:
                size = f"got {size_bytes:,} bytes, wanted {expected_bytes:,} as in {name}"
                raise BadInput(f"{self.url}/{final}: {size}; rerun the same command")
        if ranks is not None:
            self._bucket.write(RANKS_FILE, ranks.read_bytes())
        self._bucket.write(COMMITS, (self._scratch / COMMITS).read_bytes())
        reached("ledger uploaded")
        self._bucket.write(MANIFEST, manifest.encode())
        reached("manifest uploaded")
        self.delete_leftovers()

    def delete_leftovers(self) -> None:
        """Delete the temporary files of a finished preparation, in the bucket and in the scratch folder."""
        for name in [name for name in self._objects() if name.startswith((CHECKPOINT, PARTIAL))]:
            self._bucket.delete([name])
            reached("leftover deleted")
        self._empty_scratch()

    def discard(self) -> None:
        """Delete a preparation that has no tokens. Its plan is deleted last.

        Nothing is deleted if another command has started a preparation in the meantime.
        """
        if self._read(PLAN) == (self._scratch / PLAN).read_bytes():
            self.delete_leftovers()
            self._bucket.delete([PLAN])

    def _objects(self) -> dict[str, StoredObject]:
        """Return the objects directly below the prefix."""
        return {name: stored for name, stored in self._bucket.objects().items() if "/" not in name}

    def _read(self, name: str) -> bytes:
        stored = self._bucket.read(name)
        if stored is None:
            raise BadInput(f"{self.url}/{name}: missing; start over in another --output")
        return stored.content

    def _create(self, name: str, content: bytes) -> None:
        try:
            self._bucket.replace(name, content, None)
        except VersionConflict as error:
            raise BadInput(f"{self.url}/{name}: already exists: {IN_USE}") from error

    def _empty_scratch(self) -> None:
        for path in (*partial_files(self._scratch), self._scratch / PLAN, self._scratch / COMMITS):
            path.unlink(missing_ok=True)


def _checkpoint(number: int) -> str:
    return f"{CHECKPOINT}{number:08d}.safetensors"
