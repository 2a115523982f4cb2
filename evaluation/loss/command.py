"""evaluate.py loss"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs

from common.arguments import option
from common.checks import integer
from common.errors import BadInput, printable
from evaluation.loss.named_ranges import RangeName
from evaluation.shared.command_line import MeasureCommand

if TYPE_CHECKING:
    from evaluation.loss.token_range import Range
    from evaluation.shared.load import ModelLocation, Trained
    from training.parallel.process_group import Ranks

UNKNOWN = "; its training data are unknown"


@attrs.frozen(kw_only=True)
class LossCommand(MeasureCommand):
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

    def run(self) -> None:
        """Print and store each model's loss on a range of tokens."""
        self.measure_each("loss", self._choose, _measure)

    def _choose(self, places: "list[ModelLocation]") -> "tuple[Range, dict[str, Any]]":
        """Return the range and its identity."""
        from evaluation.loss.token_range import check_unseen, choose_named, choose_range, token_directory

        if self.name is not None:
            if (self.split, self.start, self.count) != (None, None, None):
                raise BadInput(f"--range {self.name}: tells split, start and count; leave out --split, --from, --count")
            span = choose_named(self.name, self.tokens, places)
        else:
            directory = self.tokens or token_directory(places)
            span = choose_range(directory, self.split or "validation", self.start, self.count, places)
        for place in places:
            check_unseen(place, span)
        print(printable(str(span)))
        return span, span.identity()


def _measure(trained: "Trained", chosen: "tuple[Range, dict[str, Any]]", ranks: "Ranks") -> tuple[dict[str, Any], str]:
    from evaluation.loss.held_out_loss import measure

    span, identity = chosen
    result = measure(trained, span, ranks)
    return {"range": identity, **attrs.asdict(result)}, f" {result}{'' if trained.place.is_own else UNKNOWN}"
