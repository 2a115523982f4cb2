"""evaluate.py loss"""

import argparse
from pathlib import Path

from common.arguments import whole_number
from evaluation.shared.command_line import TIMEOUT_SECONDS, add_device, add_models

HELP = "held-out loss in nats per token and bits per byte, with standard errors"
UNKNOWN = "; its training data are unknown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_models(parser, several=True)
    parser.add_argument("--tokens", type=Path, metavar="DIR", help="token directory; default: that of the first run")
    parser.add_argument("--split", default="validation", choices=("train", "validation", "test"), help="(%(default)s)")
    # Not --start: torchrun parses all options and takes that for an abbreviation of its own.
    parser.add_argument(
        "--from",
        type=whole_number(0),
        dest="start",
        help="first token; default: 50,000,000, or in a shorter stream the first after the validated ones",
    )
    parser.add_argument(
        "--count", type=whole_number(1), help="tokens to predict; default: 19,660,800, or all that follow"
    )
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print and store each model's loss on a range of tokens; under torchrun the ranks share the work."""
    import attrs

    from evaluation.loss.held_out_loss import describe, measure
    from evaluation.loss.token_range import Range, check_unseen, choose_range, identity, token_directory
    from evaluation.shared.load import ModelLocation, load_on_all, locate
    from evaluation.shared.results import append_result
    from training.parallel.process_group import from_coordinator, start, stop

    ranks = start(arguments.device, TIMEOUT_SECONDS)

    def prepare() -> tuple[list[ModelLocation], Range]:
        places = [locate(model, arguments.checkpoint) for model in arguments.models]
        directory = arguments.tokens or token_directory(places)
        span = choose_range(directory, arguments.split, arguments.start, arguments.count, places)
        for place in places:
            check_unseen(place, span)
        return places, span

    places, span = from_coordinator(ranks, prepare)
    if ranks.coordinates:
        print(span)
    for place in places:
        result = measure(load_on_all(ranks, place, arguments.tokenizer), span, ranks)
        if ranks.coordinates:
            append_result(place.home, place.title, "loss", {"range": identity(span), **attrs.asdict(result)})
            print(f"{place.path}: {describe(result)}{'' if place.is_own else UNKNOWN}")
    stop()
