"""evaluate.py instruct"""

import argparse
from pathlib import Path

from common.arguments import number, whole_number
from evaluation.shared.command_line import TIMEOUT_SECONDS, add_device, add_models

HELP = "fine-tune a copy on instructions, and generate answers to held-out ones"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_models(parser, several=True)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="JSON of records: instruction, input, output"
    )
    parser.add_argument("--seeds", type=whole_number(1), default=1, help="number of fine-tunings (%(default)s)")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="first seed (%(default)s)")
    parser.add_argument("--epochs", type=whole_number(1), default=20, help="maximum (%(default)s)")
    parser.add_argument("--batch-size", type=whole_number(1), default=8, help="records per update (%(default)s)")
    parser.add_argument("--learning-rate", type=number(0, above=True), default=5e-5, help="(%(default)s)")
    parser.add_argument("--weight-decay", type=number(0), default=0.1, help="(%(default)s)")
    parser.add_argument("--prompt-loss", action="store_true", help="train on the prompt's tokens as well")
    parser.add_argument(
        "--longest-answer", type=whole_number(1), default=256, help="maximum tokens of an answer (%(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="directory for answers; default: answers/ of the run"
    )
    parser.add_argument(
        "--keep-weights",
        type=Path,
        metavar="DIR",
        help="write each fine-tuned model to DIR, as Hugging Face's libraries load it",
    )
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print and store each model's scores after fine-tuning; under torchrun the ranks share the work."""
    import attrs

    from common.errors import BadInput
    from evaluation.instruct.fine_tuning import FineTuneSettings
    from evaluation.instruct.instruct import (
        HeldOutQuestions,
        Output,
        describe_summary,
        instruct,
        read_questions,
        summary,
    )
    from evaluation.shared.load import ModelLocation, load_on_all, locate
    from evaluation.shared.records import check_folder
    from evaluation.shared.results import append_result, is_newest
    from training.exactness.levels import set_determinism
    from training.parallel.process_group import from_coordinator, start, stop
    from training.telemetry.metrics_log import ANSWERS

    ranks = start(arguments.device, TIMEOUT_SECONDS)
    set_determinism("elastic", 1, ranks)

    def prepare() -> tuple[list[ModelLocation], HeldOutQuestions]:
        places = [locate(model, arguments.checkpoint) for model in arguments.models]
        titles = [place.title for place in places]
        if len(set(titles)) < len(titles):
            raise BadInput(f"MODEL: got {', '.join(titles)}, wanted each once, under different names")
        questions = read_questions(arguments.data)
        for place in places:
            check_folder(arguments.output or place.home / ANSWERS)
        if arguments.keep_weights is not None:
            check_folder(arguments.keep_weights, "--keep-weights")
        return places, questions

    places, questions = from_coordinator(ranks, prepare)
    names = {field.name for field in attrs.fields(FineTuneSettings)} - {"seed"}
    output = Output(answers=arguments.output, weights=arguments.keep_weights)
    settings = FineTuneSettings(seed=arguments.seed, **{name: getattr(arguments, name) for name in names})
    for place in places:
        if ranks.coordinates:
            print(f"{place.path}:", flush=True)
        tuned = []
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            trained = load_on_all(ranks, place, arguments.tokenizer)
            tuned.append(instruct(trained, questions, attrs.evolve(settings, seed=seed), output, ranks))
            if ranks.coordinates:
                print(f"  {tuned[-1]}", flush=True)
        if ranks.coordinates:
            values = summary(tuned, questions, settings)
            if not is_newest(place.home, place.title, "instruct", values):
                append_result(place.home, place.title, "instruct", values)
            if len(tuned) > 1:
                print(f"  {describe_summary(values)}")
    stop()
