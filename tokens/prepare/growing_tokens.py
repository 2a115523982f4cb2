"""Growing tokens: read token files while they are prepared, but only tokens that are committed and will not move."""

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

# After this time without a write, the lock is checked. A killed preparation can be restarted within this time.
DEAD_SECONDS = 60.0
# If the lock cannot be checked, the preparation counts as abandoned after this time without a write.
STALLED_SECONDS = 1800.0
NAMING_SECONDS, NAMING_TRIES = 0.1, 50  # pause and number of tries to open a file that was just renamed


class GrowingTokens:
    """A token directory that may still be in preparation."""

    def __init__(self, directory: Path):
        """Open a directory.

        Raises BadInput if it has no plan, or if its preparation will move tokens to other files at the end.
        """
        plan = read_plan(directory)
        if plan is None:
            raise BadInput(f"{directory}: has no {PLAN}; first run prepare_data.py SOURCE... --output {directory}")
        settings = plan.settings
        if settings.template is not None:
            raise BadInput(
                f"{directory}: conversations get their weights at the end; wait until then, and train without --follow"
            )
        if settings.split != HASH:
            raise BadInput(
                f"{directory}: --split {settings.split} holds out the last documents; wait for the end of the "
                "preparation"
            )
        self.directory = directory
        self.fingerprint = plan.fingerprint()
        self.settings = settings
        self.finished = False
        self.splits = ["train", *settings.held_out]
        self._units = len(plan.units)
        self._totals = Totals()
        self._steady = False  # True once it is certain that train will lose no tokens to a held-out split
        self._seen_bytes = 0  # bytes of the ledger that have been read
        self._lock = threading.Lock()
        self._written_sizes: tuple[int, ...] = ()  # sizes of the files that the preparation writes
        self._quiet_since = time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Read the entries that were committed since the last call. Thread-safe."""
        with self._lock:
            # This is checked before the log is read: once the manifest exists, the log is complete.
            finished = (self.directory / MANIFEST).exists()
            for entry, end in entries_after(self.directory / COMMITS, self._seen_bytes):
                self._seen_bytes = end
                self._totals.add(entry)
                self._steady = self._steady or is_steady(self.settings, self._totals.tokens)
            self.finished = finished

    @property
    def tokenizer(self) -> TokenizerRecord:
        """The entry that the tokenizer will have in the manifest."""
        ranks = self.directory / RANKS_FILE
        return self.settings.tokenizer_record(ranks if ranks.exists() else None)

    def committed(self, split: str) -> int:
        """Return the number of tokens that a split will keep, or 0 if held-out splits may still need the tail of train.

        When the preparation finishes, a held-out split that is larger than its share may be cut down to its share.
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
        """Return a message if the preparation has stopped too early, or None if it continues or may be restarting."""
        now, sizes = time.monotonic(), (self._seen_bytes, *self._unit_bytes())
        if self.finished or sizes != self._written_sizes:
            self._written_sizes, self._quiet_since = sizes, now
        quiet_seconds = now - self._quiet_since
        if quiet_seconds < DEAD_SECONDS:
            return None
        is_locked = is_held(self.directory / LOCK)
        if is_locked:
            # This delays the next check of the lock, because a check briefly takes the lock too.
            self._quiet_since = now - DEAD_SECONDS / 2
        if is_locked or (is_locked is None and quiet_seconds < STALLED_SECONDS):
            return None
        problem = f"its preparation has ended or hangs; it last wrote something {quiet_seconds:.0f} s ago"
        return f"{self.directory}: {problem}: {self.progress()}; rerun the command that prepares it, and then this one"

    def _unit_bytes(self) -> Iterator[int]:
        for path in sorted((self.directory / UNITS).glob("*")):
            with suppress(FileNotFoundError):
                yield path.stat().st_size

    def stream(self, split: str) -> "FollowedStream":
        return FollowedStream(self, split)


class FollowedStream(TokenStream):
    """The stream of one split of `GrowingTokens`. The stream gets longer when the tokens are refreshed."""

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
            self._find(self.length)  # a file has been renamed from its hidden name
            super().read_into(values, start, weights=weights)

    def _find(self, length: int) -> None:
        for _ in range(NAMING_TRIES):
            with suppress(FileNotFoundError):  # a file is being renamed to its final name at this moment
                super().__init__(self._files(length))
                self.versions = {}  # the files still grow
                for file in self.files:
                    file.path.stat()
                return
            time.sleep(NAMING_SECONDS)
        raise BadInput(f"{self._growing.directory}: a token file that {COMMITS} lists is missing; restore it")

    def _files(self, length: int) -> list[TokenFile]:
        directory, shard_tokens = self._growing.directory, self._growing.settings.shard_tokens or sys.maxsize
        if (directory / MANIFEST).exists():
            return open_split(directory, self._split).files
        return [
            TokenFile(self._path(index), self.dtype, HEADER_BYTES, min(shard_tokens, length - begin))
            for index, begin in enumerate(range(0, length, shard_tokens))
        ]

    def _path(self, index: int) -> Path:
        """Return the path of a file: its hidden path, or its final path if the file has already been renamed.

        The preparation renames its files before it writes the manifest, so it may have been killed in between.
        """
        growing = self._growing
        hidden = partial_path(growing.directory, self._split, index, growing.settings)
        if hidden.exists():
            return hidden
        names = [f"{self._split}.safetensors", f"{self._split}-{index:05d}-of-*.safetensors"]
        return next((path for name in names for path in growing.directory.glob(name)), hidden)
