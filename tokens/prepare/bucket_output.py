"""Bucket output: token files that grow in a bucket, where a preparation resumes without the disk that began it.

Objects under the prefix while the files grow; each is there as a whole or not at all:

    plan.json                           as in a token directory
    .partial-train-00000.safetensors    full shards, verified to have arrived
    .checkpoint-00000000.safetensors    a commit: new lines of the log, and of each split the tokens after full shards

The bucket is the only truth: the scratch folder is emptied at the start and filled from it, on any machine. At the end
the server copies each shard to its final name; a finished prefix is a token directory like any other.
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
IN_USE = "another process prepares these tokens; wait for it, or stop it"


class BucketOutput:
    """A token directory in a bucket, and its scratch folder on this disk."""

    def __init__(self, url: str, scratch: Path):
        self.url = url.rstrip("/")
        self._scratch = scratch
        self._bucket = Bucket(url)
        self._checkpoints = 0
        self._log_bytes = 0  # in checkpoints
        self._lengths: dict[str, int] = {}  # tokens of each split in shards and checkpoints

    def open(self) -> Manifest | None:
        """Empty the scratch folder, fetch the plan; return the manifest of finished tokens. Raises BadInput."""
        self._empty_scratch()
        names = self._objects()
        if PLAN in names:
            replace_file(self._scratch / PLAN, self._read(PLAN))
        elif names:
            raise BadInput(f"{self.url}/{min(names)}: exists, and no {PLAN}; pass another --output")
        if MANIFEST not in names:
            return None
        with refusing(f"{self.url}/{MANIFEST}: damaged", "begin anew in another --output"):
            manifest = parse_manifest(self._read(MANIFEST))
        for name in () if manifest is None else manifest.files:
            if name not in names:
                raise BadInput(f"{self.url}/{name}: missing, but {MANIFEST} lists it; begin anew in another --output")
        return manifest

    def describe(self) -> None:
        """Copy plan, commit log, manifest and ranks, as far as they exist, into the scratch folder."""
        names = self._objects()
        for name in sorted(names.keys() & {PLAN, COMMITS, MANIFEST, RANKS_FILE}):
            replace_file(self._scratch / name, self._read(name))
        plan = read_plan(self._scratch)
        if plan is None or COMMITS in names or plan.settings.shard_tokens is None:
            return
        self.restore(plan)
        if self._checkpoints:
            written = names[_checkpoint(self._checkpoints - 1)].written_at
            os.utime(self._scratch / COMMITS, (written, written))

    def begin(self) -> None:
        self._create(PLAN, (self._scratch / PLAN).read_bytes())
        reached("plan uploaded")

    def restore(self, plan: UnitPlan) -> None:
        """Fetch the commit log and the shards that are not full from the checkpoints. Raises BadInput without one."""
        assert plan.settings.shard_tokens is not None
        names = sorted(name for name in self._objects() if name.startswith(CHECKPOINT))
        if lost := {*map(_checkpoint, range(len(names)))} - {*names}:
            raise BadInput(f"{self.url}/{min(lost)}: missing, and later ones are there; begin anew in another --output")
        log_path = self._scratch / COMMITS
        with naming(log_path), log_path.open("wb") as log, ThreadPoolExecutor(THREADS) as threads:
            for data in threads.map(self._read, names):
                tensors = load(data)
                log.write(tensors.pop("ledger").tobytes())
                begins = {key.removesuffix(" begin"): tensors.pop(key) for key in list(tensors) if " " in key}
                for split, tokens in tensors.items():
                    shard, inside = divmod(int(begins[split][0]), plan.settings.shard_tokens)
                    path = partial_path(self._scratch, split, shard, plan.settings)
                    with (
                        naming(path),
                        path.open("ab" if inside else "wb") as file,
                    ):  # a shard may be begun several times, empty
                        file.write((b"" if inside else bytes(HEADER_BYTES)) + tokens.tobytes())
                    self._lengths[split] = int(begins[split][0]) + len(tokens)
            self._log_bytes = log.tell()
        self._checkpoints = len(names)
        if not names:
            (self._scratch / COMMITS).unlink()

    def upload(self, path: Path) -> Content:
        """Upload a full shard; return its content."""
        content = read_content(read_header(path))
        self._bucket.upload_verified(path, content.sha256)
        reached("shard uploaded")
        return content

    def checkpoint(self, streams: dict[str, GrowingStream]) -> None:
        """Commit the new lines of the log, whose full shards are in the bucket, and the new tokens after those."""
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
        """Copy shards from their hidden to their final `names`; write log and manifest; delete leftovers."""
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(self._bucket.copy, names.keys(), names.values()):
                reached("shard named")
        objects = self._objects()
        for name, final in names.items():
            got, wanted = objects[final].size_bytes, objects[name].size_bytes
            if got != wanted:
                size = f"got {got:,} bytes, wanted {wanted:,} as in {name}"
                raise BadInput(f"{self.url}/{final}: {size}; rerun the same command")
        if ranks is not None:
            self._bucket.write(RANKS_FILE, ranks.read_bytes())
        self._bucket.write(COMMITS, (self._scratch / COMMITS).read_bytes())
        reached("ledger uploaded")
        self._bucket.write(MANIFEST, manifest.encode())
        reached("manifest uploaded")
        self.delete_leftovers()

    def delete_leftovers(self) -> None:
        """Delete leftovers of a finished preparation, in the bucket and here."""
        for name in [name for name in self._objects() if name.startswith((CHECKPOINT, PARTIAL))]:
            self._bucket.delete([name])
            reached("leftover deleted")
        self._empty_scratch()

    def discard(self) -> None:
        """Delete a preparation without tokens, the plan last; not what another command has begun meanwhile."""
        if self._read(PLAN) == (self._scratch / PLAN).read_bytes():
            self.delete_leftovers()
            self._bucket.delete([PLAN])

    def _objects(self) -> dict[str, StoredObject]:
        """Return the objects directly under the prefix."""
        return {name: found for name, found in self._bucket.objects().items() if "/" not in name}

    def _read(self, name: str) -> bytes:
        found = self._bucket.read(name)
        if found is None:
            raise BadInput(f"{self.url}/{name}: missing; begin anew in another --output")
        return found.content

    def _create(self, name: str, content: bytes) -> None:
        try:
            self._bucket.replace(name, content, None)
        except VersionConflict as error:
            raise BadInput(f"{self.url}/{name}: exists: {IN_USE}") from error

    def _empty_scratch(self) -> None:
        for path in (*partial_files(self._scratch), self._scratch / PLAN, self._scratch / COMMITS):
            path.unlink(missing_ok=True)


def _checkpoint(number: int) -> str:
    return f"{CHECKPOINT}{number:08d}.safetensors"
