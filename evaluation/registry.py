"""Registry of evaluate commands that measure a model. A new one: its folder, and a line here."""

from collections.abc import Callable
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
class Question:
    """A command that appends results to `evaluations.jsonl`, under its own name."""

    command: type[EvaluateCommand]
    # Module whose `read_results` structures such a line for the comparison, imported at use: numpy and torch are heavy.
    # Of a damaged line, or another version's, it may raise rows.UNREADABLE. None: nothing to compare.
    measures: str | None = None

    def read_results(self, record: dict[str, Any]) -> "list[EvaluationResult]":
        """Structure a stored result."""
        if self.measures is None:
            return []
        read: Callable[[dict[str, Any]], list[EvaluationResult]] = import_module(self.measures).read_results
        return read(record)


QUESTIONS = {  # in the order of the comparison's columns
    "smoke": Question(SmokeCommand),
    "loss": Question(LossCommand, "evaluation.loss.loss_measures"),
    "hellaswag": Question(HellaSwagCommand, "evaluation.hellaswag.accuracy_measures"),
    "instruct": Question(InstructCommand, "evaluation.instruct.overlap"),
    "judge": Question(JudgeCommand, "evaluation.judging.score_measures"),
    "harness": Question(HarnessCommand, "evaluation.harness.harness"),
}
