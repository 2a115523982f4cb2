"""Token stream that is still being written, as a source of batches: those that the finished files give.

What is committed does not change, so a window can be read as soon as everything that its place depends on is committed.
"""

from pathlib import Path
from typing import Protocol

import attrs
import numpy as np

from common.errors import BadInput
from tokens.batches.sampling import WindowOrder, window_count
from tokens.format.token_file import TokenStream

ENDLESS = 1 << 62  # windows of a stream whose length is not known yet


class Growing(Protocol):
    """Token files of a preparation that may still be at work."""

    directory: Path
    finished: bool

    def committed(self, split: str) -> int:
        """Return the tokens of a split that are final."""

    def refresh(self) -> None:
        """Look again how far the preparation has come."""

    def progress(self) -> str:
        """Describe how far the preparation has come."""


@attrs.frozen(kw_only=True)
class GrowingSource:
    """A growing token stream and its read order: the counterpart of TokenSource."""

    stream: TokenStream
    start_token: int
    order: WindowOrder  # of ENDLESS windows
    max_epochs: int
    growing: Growing

    def first_tokens(self, places: np.ndarray, context_length: int) -> np.ndarray:
        """Return the first token of the window read at each place of the order, int64."""
        return self.start_token + self._order(context_length).windows(places) * context_length

    def ready(self, place: int, context_length: int) -> bool:
        """Tell whether the window at a place, and all before it, can be read. Raises BadInput if never."""
        tokens = self.start_token + self.order.needed(place) * context_length + 1
        if not self.growing.finished and self.growing.committed("train") < tokens:
            self.growing.refresh()
        if not self.growing.finished:
            return self.growing.committed("train") >= tokens
        windows = self._order(context_length).count
        if place >= windows * self.max_epochs:
            raise BadInput(
                f"{self.growing.directory}: ended with {windows:,} windows of {context_length} tokens, but the run "
                f"wants more than {self.max_epochs} epoch{'s' * (self.max_epochs > 1)} of them; lower "
                "min_train_tokens, or raise max_epochs",
                alone=True,
            )
        return True

    def _order(self, context_length: int) -> WindowOrder:
        if not self.growing.finished:
            return self.order
        count = window_count(self.growing.committed("train"), self.start_token, context_length)
        return attrs.evolve(self.order, count=count)
