"""Registry of the commands of `evaluate.py` that measure models. To add one: write its folder, add a line here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from evaluation.harness.command import HarnessCommand
from evaluation.hellaswag.command import HellaSwagCommand
from evaluation.instruct.command import InstructCommand
from evaluation.judging.command import JudgeCommand
from evaluation.loss.command import LossCommand
from evaluation.smoke.command import SmokeCommand

if TYPE_CHECKING:
    from evaluation.shared.measure import EvaluationResult


class EvaluateCommand(Protocol):
    """A command of `evaluate.py`: a frozen class with its options; the docstring is its help."""

    def run(self) -> int | None:
        """Do the work; return an exit status, None for success."""


@attrs.frozen
class MeasuringCommand:
    """A command that appends results to `evaluations.jsonl` under its own name, and how the comparison reads them."""

    command: type[EvaluateCommand]
    # Module whose `read_results` structures such a line, imported at use: numpy and torch are heavy. Of a damaged line,
    # or another version's, it may raise UNREADABLE of evaluation/comparison/rows.py. None: nothing to compare.
    measures: str | None = None

    def read_results(self, record: dict[str, Any]) -> "list[EvaluationResult]":
        """Structure a stored result."""
        return import_module(self.measures).read_results(record) if self.measures else []


COMMANDS = {  # in the order of the comparison's columns
    "smoke": MeasuringCommand(SmokeCommand),
    "loss": MeasuringCommand(LossCommand, "evaluation.loss.loss_measures"),
    "hellaswag": MeasuringCommand(HellaSwagCommand, "evaluation.hellaswag.accuracy_measures"),
    "instruct": MeasuringCommand(InstructCommand, "evaluation.instruct.overlap"),
    "judge": MeasuringCommand(JudgeCommand, "evaluation.judging.judge_result"),
    "harness": MeasuringCommand(HarnessCommand, "evaluation.harness.harness"),
}
