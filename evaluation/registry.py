"""Registry of evaluate commands that question a model. A new command: its folder, and a line here."""

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from evaluation.harness import command as harness
from evaluation.hellaswag import command as hellaswag
from evaluation.instruct import command as instruct
from evaluation.judging import command as judge
from evaluation.loss import command as loss
from evaluation.smoke import command as smoke

if TYPE_CHECKING:
    from evaluation.shared.measure import EvaluationResult


class EvaluateCommand(Protocol):
    """A command of `evaluate.py`: a module with a line of help, options, and the work."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Do the work; return an exit status, None for success."""


class Question(EvaluateCommand, Protocol):
    """A command that appends results to `evaluations.jsonl`, one line for a model, under its own name."""

    def read_results(self, record: dict[str, Any]) -> "list[EvaluationResult]":
        """Structure such a line for the comparison; none where it has nothing to compare.

        Of a damaged line, or another version's, it may raise ArithmeticError, AttributeError, LookupError, TypeError or
        ValueError.
        """


QUESTIONS: dict[str, Question] = {  # in the order of the comparison's columns
    "smoke": smoke,
    "loss": loss,
    "hellaswag": hellaswag,
    "instruct": instruct,
    "judge": judge,
    "harness": harness,
}
