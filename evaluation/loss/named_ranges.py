"""Named ranges of public token sets, on which others have published losses."""

from typing import Any, Literal

import attrs

RangeName = Literal["fineweb-val-10m", "gpjt-test"]


@attrs.frozen(kw_only=True)
class NamedRange:
    """A range of a hub dataset: tokens start + 1 .. start + count of the split are predicted."""

    dataset: str
    split: str
    start: int
    count: int
    validates: bool  # whether runs are meant to validate on it, and publish that loss

    def identity(self) -> dict[str, Any]:
        """Return the fields that a stored result of it has."""
        return {"dataset": self.dataset, "split": self.split, "start": self.start, "count": self.count}


NAMED_RANGES: dict[RangeName, NamedRange] = {
    # The records of KellerJordan/modded-nanogpt are validated on it, in the tables of its README.
    "fineweb-val-10m": NamedRange(
        dataset="kjj0/fineweb10B-gpt2", split="validation", start=0, count=10_485_760, validates=True
    ),
    # gpjt/ddp-base-model-from-scratch compares its models on it.
    "gpjt-test": NamedRange(
        dataset="gpjt/fineweb-gpt2-tokens", split="validation", start=50_000_000, count=19_660_800, validates=False
    ),
}
