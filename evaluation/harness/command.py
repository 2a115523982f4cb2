"""evaluate.py harness"""

import argparse
from pathlib import Path

from common.arguments import whole_number
from common.errors import BadInput
from evaluation.shared.command_line import TIMEOUT_SECONDS, add_device, add_models

HELP = "run tasks of lm-evaluation-harness, which must be installed"
REQUIREMENT = "lm_eval[hf]==0.4.13"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("tasks", metavar="TASKS", help="comma-separated names; `lm-eval ls tasks` lists them")
    add_models(parser, several=True)
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="directory of additional tasks, as YAML files")
    parser.add_argument("--fewshot", type=whole_number(0), help="examples in the context; default: the task's")
    parser.add_argument("--limit", type=whole_number(1), help="documents per task, for a trial; default: all")
    parser.add_argument("--batch-size", type=whole_number(1), default=16, help="requests per batch (%(default)s)")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print and store each model's metrics; under torchrun the ranks share the work."""
    try:
        import lm_eval
    except ImportError as error:
        raise BadInput(f'lm-evaluation-harness is not installed ({error}): pip install "{REQUIREMENT}"') from error
    from evaluation.harness.harness import Wanted, describe, measure
    from evaluation.shared.load import load_on_all, locate
    from evaluation.shared.results import append_result
    from training.parallel.process_group import from_coordinator, start, stop

    if arguments.include_path is not None and not arguments.include_path.is_dir():
        raise BadInput(
            f"--include-path {arguments.include_path}: no such directory; wanted one with tasks as YAML files"
        )
    ranks = start(arguments.device, TIMEOUT_SECONDS)
    wanted = Wanted(
        tasks=arguments.tasks.split(","),
        fewshot=arguments.fewshot,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        folder=arguments.include_path,
    )
    places = from_coordinator(ranks, lambda: [locate(model, arguments.checkpoint) for model in arguments.models])
    for place in places:
        found = measure(load_on_all(ranks, place, arguments.tokenizer), wanted, ranks)
        if ranks.coordinates:
            how = {"lm_eval": lm_eval.__version__, "fewshot": wanted.fewshot, "limit": wanted.limit}
            append_result(place.home, place.title, "harness", {**how, "batch_size": wanted.batch_size, "tasks": found})
            print(f"{place.path}:\n{describe(found)}")
    stop()
