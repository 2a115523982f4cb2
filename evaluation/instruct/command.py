"""evaluate.py instruct"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
from cyclopts import Parameter

from common.arguments import option
from common.checks import integer, number
from common.errors import BadInput, printable
from evaluation.shared.command_line import TIMEOUT_SECONDS, MeasureCommand

if TYPE_CHECKING:
    from evaluation.instruct.instruct import HeldOutQuestions
    from evaluation.shared.load import ModelLocation


@attrs.frozen(kw_only=True)
class FineTuneSettings:
    """Fine-tuning hyperparameters. The defaults are those of Raschka's book, which gpjt's comparisons use."""

    # of the order of records, and of dropout
    seed: Annotated[int, option("first seed", "N", check=integer(0))] = 0
    epochs: Annotated[int, option("maximum", "N", check=integer(1))] = 20
    batch_size: Annotated[int, option("records per update", "N", check=integer(1))] = 8
    learning_rate: Annotated[float, option("learning rate, constant", "X", check=number(0, above=True))] = 5e-5
    weight_decay: Annotated[float, option("decay of the weights", "X", check=number(0))] = 0.1
    prompt_loss: Annotated[bool, option("train on the prompt's tokens as well")] = False
    # at most half the context
    longest_answer: Annotated[int, option("maximum tokens of an answer", "N", check=integer(1))] = 256


@attrs.frozen(kw_only=True)
class InstructCommand(MeasureCommand):
    """Fine-tune a copy on instructions, and generate answers to held-out ones."""

    data: Annotated[Path, option("JSON of records: instruction, input, output", "FILE")]
    seeds: Annotated[int, option("number of fine-tunings", "N", check=integer(1))] = 1
    settings: Annotated[FineTuneSettings, Parameter(name="*")] = FineTuneSettings()
    output: Annotated[Path | None, option("directory for answers; default: answers/ of the run", "DIR")] = None
    keep_weights: Annotated[
        Path | None, option("write each fine-tuned model to DIR, as Hugging Face's libraries load it", "DIR")
    ] = None

    def run(self) -> None:
        """Print and store each model's scores after fine-tuning; under torchrun the ranks share the work."""
        from evaluation.instruct.instruct import describe_summary, instruct, summary
        from evaluation.shared.load import load_on_all
        from evaluation.shared.results import append_result, is_newest
        from training.exactness.levels import set_determinism
        from training.parallel.process_group import from_coordinator, meet, stop

        ranks = meet(self.device, TIMEOUT_SECONDS)
        set_determinism("elastic", 1, ranks)
        places, questions = from_coordinator(ranks, self._prepare)
        first = self.settings.seed
        for place in places:
            if ranks.coordinates:
                print(printable(f"{place.path}:"), flush=True)
            tuned = []
            for seed in range(first, first + self.seeds):
                trained = load_on_all(ranks, place, self.tokenizer)
                tuned.append(instruct(trained, questions, attrs.evolve(self.settings, seed=seed), self, ranks))
                if ranks.coordinates:
                    print(f"  {tuned[-1]}", flush=True)
            if ranks.coordinates:
                values = summary(tuned, questions, self.settings)
                if not is_newest(place.home, place.title, "instruct", values):
                    append_result(place.home, place.title, "instruct", values)
                if len(tuned) > 1:
                    print(f"  {describe_summary(values)}")
        stop()

    def _prepare(self) -> "tuple[list[ModelLocation], HeldOutQuestions]":
        from evaluation.instruct.instruct import read_questions
        from evaluation.shared.records import check_folder
        from training.telemetry.metrics_log import ANSWERS

        places = self.locate_all()
        titles = [place.title for place in places]
        if len(set(titles)) < len(titles):
            raise BadInput(f"MODEL: got {', '.join(titles)}, wanted each once, under different names")
        questions = read_questions(self.data)
        for place in places:
            check_folder(self.output or place.home / ANSWERS)
        if self.keep_weights is not None:
            check_folder(self.keep_weights, "--keep-weights")
        return places, questions
