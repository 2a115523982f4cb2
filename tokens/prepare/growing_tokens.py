"""Growing tokens: token files read while they are prepared, as far as the commit log; the finished ones begin so."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.errors import BadInput
from common.files import is_held
from common.json_files import utc_time
from tokens.format.header import HEADER_BYTES, TokenFile
from tokens.format.manifest import MANIFEST, PLAN, RANKS_FILE, TokenizerRecord
from tokens.format.token_file import TokenStream, open_split
from tokens.prepare.commit_log import COMMITS, Totals, entries_after
from tokens.prepare.growing_files import LOCK, UNITS, partial_path
from tokens.prepare.plan import HASH, is_steady, read_plan

DEAD_SECONDS = 60.0  # without a written byte, before the lock is looked at: the preparer may have been started anew
STALLED_SECONDS = 1800.0  # without a written byte, where locks are not seen
NAMING_SECONDS, NAMING_TRIES = 0.1, 50  # between looks for a file that has just lost its hidden name


class GrowingTokens:
    """A token directory that may still be in preparation."""

    def __init__(self, directory: Path):
        """Open it. Raises BadInput without a plan, and where the end of the preparation moves tokens between files."""
        plan = read_plan(directory)
        if plan is None:
            raise BadInput(f"{directory}: no {PLAN}; prepare_data.py SOURCE... --output {directory} writes one first")
        settings = plan.settings
        if settings.template is not None:
            raise BadInput(f"{directory}: conversations, whose weights come at the end; wait for it, without --follow")
        if settings.split != HASH:
            raise BadInput(f"{directory}: --split {settings.split} holds out the last documents; wait for the end")
        self.directory = directory
        self.fingerprint = plan.fingerprint()
        self.settings = settings
        self.finished = False
        self.splits = ["train", *settings.held_out]
        self._units = len(plan.units)
        self._totals = Totals()
        self._steady = False  # no token of train will be moved to a held-out split any more
        self._seen_bytes = 0  # of the ledger
        self._lock = threading.Lock()
        self._written: tuple[int, ...] = ()  # sizes of what the preparer writes
        self._quiet_since = time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Read the entries committed since the last call. Thread-safe."""
        with self._lock:
            finished = (self.directory / MANIFEST).exists()  # before the log: a finished one has all its lines
            for entry, end in entries_after(self.directory / COMMITS, self._seen_bytes):
                self._seen_bytes = end
                self._totals.add(entry)
                self._steady = self._steady or is_steady(self.settings, self._totals.tokens)
            self.finished = finished

    @property
    def tokenizer(self) -> TokenizerRecord:
        """The tokenizer, as the manifest will have it."""
        ranks = self.directory / RANKS_FILE
        return self.settings.tokenizer_record(ranks if ranks.exists() else None)

    def committed(self, split: str) -> int:
        """Return the tokens of a split that will stay; 0 while a held-out split may be cut from the tail of train.

        A held-out split with more than its share may be shortened to its share at the end.
        """
        if self._totals.cut is not None:
            return self._totals.cut[split]
        tokens = self._totals.tokens
        if self.finished or not self._steady:
            return tokens[split] if self.finished else 0
        share = self.settings.held_out.get(split)
        return tokens[split] if share is None else min(tokens[split], round(share * sum(tokens.values())))

    def progress(self) -> str:
        units = f"{self._totals.units:,} of {self._units:,} units, {self.committed('train'):,} tokens to train on"
        ledger = self.directory / COMMITS
        if self.finished or not ledger.exists():
            return units
        return f"{units}, last commit at {utc_time(ledger.stat().st_mtime)} by the disk's clock"

    def abandoned(self) -> str | None:
        """Return that no process prepares these tokens any more, or None where one does, or may be started anew."""
        now, written = time.monotonic(), (self._seen_bytes, *self._unit_bytes())
        if self.finished or written != self._written:
            self._written, self._quiet_since = written, now
        quiet_seconds = now - self._quiet_since
        if quiet_seconds < DEAD_SECONDS:
            return None
        held = is_held(self.directory / LOCK)
        if held:
            self._quiet_since = now - DEAD_SECONDS / 2  # it is seldom locked by this look
        if held or (held is None and quiet_seconds < STALLED_SECONDS):
            return None
        problem = f"its preparation has ended or hangs, {quiet_seconds:.0f} s after it wrote last"
        return f"{self.directory}: {problem}: {self.progress()}; rerun its command, then this one"

    def _unit_bytes(self) -> Iterator[int]:
        for path in sorted((self.directory / UNITS).glob("*")):
            with suppress(FileNotFoundError):
                yield path.stat().st_size

    def stream(self, split: str) -> "FollowedStream":
        return FollowedStream(self, split)


class FollowedStream(TokenStream):
    """The stream of one split of `GrowingTokens`, whose length grows as that is refreshed."""

    def __init__(self, tokens: GrowingTokens, split: str):
        self._growing, self._split = tokens, split
        self.dtype = tokens.settings.dtype
        self.files, self.length, self.versions = [], 0, {}

    def read_into(self, values: np.ndarray, start: int, *, weights: bool = False) -> None:
        """Fill an array with the tokens from `start` on, which must have been committed."""
        if start + len(values) > self.length:
            self._find(self._growing.committed(self._split))
        try:
            super().read_into(values, start, weights=weights)
        except BadInput as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._find(self.length)  # a file has lost its hidden name
            super().read_into(values, start, weights=weights)

    def _find(self, length: int) -> None:
        for _ in range(NAMING_TRIES):
            with suppress(FileNotFoundError):  # it got its final name just now
                super().__init__(self._files(length))
                self.versions = {}  # they grow
                for file in self.files:
                    file.path.stat()
                return
            time.sleep(NAMING_SECONDS)
        raise BadInput(f"{self._growing.directory}: a token file of its {COMMITS} is gone; bring it back")

    def _files(self, length: int) -> list[TokenFile]:
        directory, shard_tokens = self._growing.directory, self._growing.settings.shard_tokens or sys.maxsize
        if (directory / MANIFEST).exists():
            return open_split(directory, self._split).files
        return [
            TokenFile(self._path(index), self.dtype, HEADER_BYTES, min(shard_tokens, length - begin))
            for index, begin in enumerate(range(0, length, shard_tokens))
        ]

    def _path(self, index: int) -> Path:
        """Return the path of a file: hidden, or final where a kill came between the names and the manifest."""
        growing = self._growing
        hidden = partial_path(growing.directory, self._split, index, growing.settings)
        if hidden.exists():
            return hidden
        names = [f"{self._split}.safetensors", f"{self._split}-{index:05d}-of-*.safetensors"]
        return next((path for name in names for path in growing.directory.glob(name)), hidden)
