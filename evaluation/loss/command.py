"""evaluate.py loss"""

from pathlib import Path
from typing import Annotated, Literal

import attrs

from common.arguments import option, whole_number
from evaluation.shared.command_line import TIMEOUT_SECONDS, Checkpoint, Device, Models, Tokenizer

UNKNOWN = "; its training data are unknown"


@attrs.frozen(kw_only=True)
class LossCommand:
    """Held-out loss in nats per token and bits per byte, with standard errors."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    tokens: Annotated[Path | None, option("token directory; default: that of the first run", "DIR")] = None
    split: Annotated[Literal["train", "validation", "test"], option("part of the tokens")] = "validation"
    # Not --start: torchrun parses all options and takes that for an abbreviation of its own.
    start: Annotated[
        int | None,
        option(
            "first token; default: 50,000,000, or in a shorter stream the first after the validated ones",
            "N",
            name="--from",
            check=whole_number(0),
        ),
    ] = None
    count: Annotated[
        int | None, option("tokens to predict; default: 19,660,800, or all that follow", "N", check=whole_number(1))
    ] = None
    device: Device = None

    def run(self) -> None:
        """Print and store each model's loss on a range of tokens; under torchrun the ranks share the work."""
        from evaluation.loss.held_out_loss import describe, measure
        from evaluation.loss.token_range import Range, check_unseen, choose_range, identity, token_directory
        from evaluation.shared.load import ModelLocation, load_on_all, locate
        from evaluation.shared.results import append_result
        from training.parallel.process_group import from_coordinator, start, stop

        ranks = start(self.device, TIMEOUT_SECONDS)

        def prepare() -> tuple[list[ModelLocation], Range]:
            places = [locate(model, self.checkpoint) for model in self.models]
            directory = self.tokens or token_directory(places)
            span = choose_range(directory, self.split, self.start, self.count, places)
            for place in places:
                check_unseen(place, span)
            return places, span

        places, span = from_coordinator(ranks, prepare)
        if ranks.coordinates:
            print(span)
        for place in places:
            result = measure(load_on_all(ranks, place, self.tokenizer), span, ranks)
            if ranks.coordinates:
                append_result(place.home, place.title, "loss", {"range": identity(span), **attrs.asdict(result)})
                print(f"{place.path}: {describe(result)}{'' if place.is_own else UNKNOWN}")
        stop()
