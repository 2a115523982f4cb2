"""evaluate.py hellaswag"""

import argparse
from typing import TYPE_CHECKING, Any

from common.arguments import whole_number
from evaluation.shared.command_line import TIMEOUT_SECONDS, add_device, add_models

if TYPE_CHECKING:
    from evaluation.shared.measure import EvaluationResult

HELP = "accuracy on HellaSwag, in both ways that others publish it in"
ITEMS = 10_042  # in the validation split
# karpathy/build-nanogpt, hellaswag.py: its own figures, and those of lm-evaluation-harness.
PUBLISHED = {
    "completion": ("as build-nanogpt and llm.c count", 0.2859, 0.2955),
    "lm-eval": ("as lm-evaluation-harness counts", 0.2892, 0.3114),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_models(parser, several=True)
    parser.add_argument(
        "--data",
        metavar="FILE|OWNER/NAME",
        default="Rowan/hellaswag",
        help="items as hellaswag_val.jsonl has them, or a dataset of the hub, its validation split (%(default)s)",
    )
    parser.add_argument("--count", type=whole_number(1), help="items, from the first on; default: all")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print and keep each model's accuracies; under torchrun the ranks share the work."""
    import attrs

    from evaluation.hellaswag.hellaswag import describe, measure
    from evaluation.hellaswag.items import Items, read_items
    from evaluation.shared.load import ModelLocation, load_on_all, locate
    from evaluation.shared.results import append_result
    from training.parallel.process_group import from_coordinator, start, stop

    ranks = start(arguments.device, TIMEOUT_SECONDS)

    def prepare() -> tuple[list[ModelLocation], Items]:
        places = [locate(model, arguments.checkpoint) for model in arguments.models]
        return places, read_items(arguments.data, arguments.count)

    places, data = from_coordinator(ranks, prepare)
    if ranks.coordinates:
        print(f"{data.file}: {len(data.items):,} items")
        for name, (how, acc, acc_norm) in PUBLISHED.items():
            print(f"{name}: {how}; GPT-2 124M has acc {acc:.4f}, acc_norm {acc_norm:.4f} on all {ITEMS:,}")
    for place in places:
        result = measure(load_on_all(ranks, place, arguments.tokenizer), data.items, ranks)
        if ranks.coordinates:
            what = {"data": {"file": data.file, "sha256": data.sha256}}
            append_result(place.home, place.title, "hellaswag", what | attrs.asdict(result))
            cut = f"; the context did not hold all of {result.cut:,} items" if result.cut else ""
            print(f"{place.path}: completion: {describe(result.completion)}; lm-eval: {describe(result.lm_eval)}{cut}")
    stop()


def read_results(record: dict[str, Any]) -> "list[EvaluationResult]":
    """Structure a stored result for the comparison."""
    from evaluation.hellaswag.accuracy_measures import read_accuracies

    return read_accuracies(record)
