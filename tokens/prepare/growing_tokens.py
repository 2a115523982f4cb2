"""Token files that are still being written, read as far as their ledger goes.

What is committed stays as it is: the finished files begin with the same tokens. So whoever waits for what a batch needs
reads the same batch while the files grow as when they are done.
"""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BadInput
from common.json_files import parse_json, read_regular
from tokens.format.manifest import MANIFEST
from tokens.format.splits import HASH
from tokens.format.token_file import HEADER_BYTES, TokenFile, TokenStream, Version, open_split
from tokens.prepare.commit_log import LEDGER, entries_after
from tokens.prepare.growing_files import partial_path
from tokens.prepare.plan import read_plan
from tokens.tokenizer.tokenizer import RANKS_FILE, token_dtype

NAMING_SECONDS, NAMING_TRIES = 0.1, 50  # until a file that has lost its hidden name is looked for again


class GrowingTokens:
    """The token directory of a preparation that may still be at work."""

    def __init__(self, directory: Path):
        """Open it. Raises BadInput where there is no plan, or where the end of the work moves tokens between files."""
        plan = read_plan(directory)
        if plan is None:
            raise BadInput(
                f"{directory}: no plan.json; prepare_data.py SOURCE... --output {directory} writes one first"
            )
        settings = plan.settings
        if settings.split != HASH:
            raise BadInput(
                f"{directory}: prepared with --split {settings.split}, which holds out what comes last; wait for its "
                "end, or prepare with --split hash"
            )
        self.directory = directory
        self.fingerprint = plan.fingerprint()
        self.settings = settings
        self.finished = False
        self._units = len(plan.units)
        self._seen_units = 0
        self._seen_bytes = 0  # of the ledger
        shares = {"validation": settings.validation_fraction, "test": settings.test_fraction}
        self.splits = ["train", *(split for split, share in shares.items() if share > 0)]
        self._tokens = dict.fromkeys(self.splits, 0)
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Look how far the work has come. Any thread may."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        finished = (self.directory / MANIFEST).exists()  # before the ledger: what is finished has all its lines
        for entry, end in entries_after(self.directory / LEDGER, self._seen_bytes):
            self._seen_bytes = end
            if "uploaded" in entry:
                raise BadInput(f"{self.directory}: its shards leave for a bucket while it grows; follow a folder")
            if "cut" in entry:
                self._tokens = {split: entry["cut"][split] for split in self.splits}
            else:
                self._seen_units += 1
                for split, part in entry["parts"].items():
                    self._tokens[split] += part["tokens"]
        self.finished = finished

    @property
    def tokenizer(self) -> dict[str, Any]:
        """What the manifest will tell of the tokenizer."""
        ranks_file = RANKS_FILE if (self.directory / RANKS_FILE).exists() else None
        return {
            "name": Path(self.settings.tokenizer).name,
            "vocabulary_size": self.settings.vocabulary_size,
            "end_of_text_id": self.settings.end_of_text_id,
            "ranks_file": ranks_file,
        }

    def committed(self, split: str) -> int:
        """Return how many tokens of a split are there to stay.

        0 while a split that is wanted is empty: at the end it might still be cut out of the train stream's tail.
        """
        return self._tokens[split] if self.finished or all(self._tokens.values()) else 0

    def progress(self) -> str:
        """Return how far the work has come, for people."""
        units = f"{self._seen_units:,} of {self._units:,} units, {self.committed('train'):,} tokens to train on"
        ledger = self.directory / LEDGER
        if self.finished or not ledger.exists():
            return units
        return f"{units}, last commit {max(0.0, time.time() - ledger.stat().st_mtime):.0f} s ago"

    def stream(self, split: str) -> "FollowedStream":
        """Return one split."""
        return FollowedStream(self, split)


class FollowedStream(TokenStream):
    """One split of `GrowingTokens`: its length grows as that is refreshed."""

    def __init__(self, tokens: GrowingTokens, split: str):
        self._growing, self._split = tokens, split
        self.dtype = token_dtype(tokens.settings.vocabulary_size).newbyteorder("<")
        self.files, self.length = [], 0

    def read_into(self, tokens: np.ndarray, start: int) -> None:
        """Fill an array with what begins at `start`. It must have been committed."""
        if start + len(tokens) > self.length:
            self._find(self._growing.committed(self._split))
        try:
            super().read_into(tokens, start)
        except BadInput as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._find(self.length)  # a file has lost its hidden name
            super().read_into(tokens, start)

    @property
    def versions(self) -> dict[Path, Version | None]:
        """Nothing: these files grow."""
        return {}

    def _find(self, length: int) -> None:
        growing = self._growing
        shard_tokens = growing.settings.shard_tokens or length
        tries = 0
        while True:
            try:
                if (growing.directory / MANIFEST).exists():
                    super().__init__(open_split(growing.directory, self._split).files)
                else:
                    super().__init__(
                        [
                            TokenFile(
                                self._path(index),
                                self.dtype,
                                HEADER_BYTES,
                                min(shard_tokens, length - index * shard_tokens),
                            )
                            for index in range(-(-length // max(1, shard_tokens)))
                        ]
                    )
                for file in self.files:
                    file.path.stat()
                return
            except FileNotFoundError as error:  # it was given its name just now
                tries += 1
                if tries == NAMING_TRIES:
                    raise BadInput(
                        f"{growing.directory}: a token file that its {LEDGER} lists is gone; bring it back, or prepare "
                        "these tokens anew"
                    ) from error
                time.sleep(NAMING_SECONDS)

    def _path(self, index: int) -> Path:
        """Return where a file is: hidden, or under its name, where the writer was killed before the manifest came."""
        growing, sharded = self._growing, self._growing.settings.shard_tokens is not None
        hidden = partial_path(growing.directory, self._split, index, sharded=sharded)
        if hidden.exists():
            return hidden
        names = [f"{self._split}.safetensors", f"{self._split}-{index:05d}-of-*.safetensors"]
        return next((path for name in names for path in growing.directory.glob(name)), hidden)


def finished_by(directory: Path) -> str | None:
    """Return the fingerprint of the plan by which finished token files were made, or None where that is not known."""
    try:
        plan = parse_json(read_regular(directory / MANIFEST)).get("plan")
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, str) else None
