"""Options of evaluate.py loss, and named ranges of public token sets, on which others have published losses."""

from pathlib import Path
from typing import Annotated, Any, Literal

import attrs

from common.arguments import option
from common.checks import integer
from evaluation.shared.command_line import MeasureOptions

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


@attrs.frozen(kw_only=True)
class LossCommand(MeasureOptions):
    """Held-out loss in nats per token and bits per byte, with standard errors."""

    tokens: Annotated[Path | None, option("token directory; default: that of the first run", "DIR")] = None
    name: Annotated[
        RangeName | None,
        option("published range, in place of --split, --from and --count; its tokens are downloaded", name="--range"),
    ] = None
    split: Annotated[
        Literal["train", "validation", "test"] | None, option("part of the tokens; default: validation")
    ] = None
    # Not --start: torchrun parses all options and takes that for an abbreviation of its own.
    start: Annotated[
        int | None,
        option(
            "first token; default: 50,000,000, or in a shorter stream the first after the validated ones",
            "N",
            name="--from",
            check=integer(0),
        ),
    ] = None
    count: Annotated[
        int | None, option("tokens to predict; default: 19,660,800, or all that follow", "N", check=integer(1))
    ] = None
