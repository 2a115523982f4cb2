"""evaluate.py smoke"""

import argparse
from typing import TYPE_CHECKING

from common.arguments import number, whole_number
from common.errors import BadInput
from evaluation.shared.command_line import TIMEOUT_SECONDS, add_device, add_models

if TYPE_CHECKING:
    from evaluation.smoke.smoke import Continuation

HELP = "generate continuations of fixed prompts, or of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_models(parser, several=True)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="replaces the fixed prompts; repeatable")
    parser.add_argument(
        "--tokens", type=whole_number(1), help="tokens to generate; default: 40, or half of a short context"
    )
    parser.add_argument(
        "--temperature", type=number(0), default=1.0, help="sampling temperature; 0: greedy only (%(default)s)"
    )
    parser.add_argument(
        "--top-k", type=whole_number(1), default=25, help="sampling candidates for each token (%(default)s)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="sampling seed (%(default)s)")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print and store each model's continuations; under torchrun the ranks share the prompts."""
    import attrs  # after --help: the imports take seconds

    from evaluation.shared.load import load_on_all, locate
    from evaluation.shared.results import append_result
    from evaluation.smoke.smoke import smoke
    from model.generate import Sampling
    from training.parallel.process_group import from_coordinator, start, stop

    ranks = start(arguments.device, TIMEOUT_SECONDS)
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    places = from_coordinator(ranks, lambda: [locate(model, arguments.checkpoint) for model in arguments.models])
    problems = []
    for place in places:
        trained = load_on_all(ranks, place, arguments.tokenizer)
        said = smoke(trained, arguments.prompt, arguments.tokens, sampling, ranks)
        problems += [f"{place.path}: degenerate output: {item.problem}" for item in said if item.problem]
        if ranks.coordinates:
            values = {"top_k": sampling.top_k, "seed": sampling.seed}
            append_result(place.home, place.title, "smoke", values | {"said": [attrs.asdict(item) for item in said]})
            print(f"{place.path}:\n{_shown(said)}")
    stop()
    if problems:
        raise BadInput(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def _shown(said: list["Continuation"]) -> str:
    lines = []
    for item in said:
        way = "greedy" if item.temperature == 0 else f"temperature {item.temperature:g}"
        lines.append(f"[{way}] {item.prompt}{item.text}")
    return "\n".join(lines)
