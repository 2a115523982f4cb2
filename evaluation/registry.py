"""Registry of evaluate commands that measure a model. A new one: its folder, and a line here."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from evaluation.harness import command as harness
from evaluation.hellaswag import command as hellaswag
from evaluation.instruct import command as instruct
from evaluation.judging import command as judge
from evaluation.loss import command as loss
from evaluation.smoke import command as smoke

if TYPE_CHECKING:
    from evaluation.shared.measure import EvaluationResult


class EvaluateCommand(Protocol):
    """A command of `evaluate.py`: a module with one line of help, options, and the work."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Do the work; return an exit status, None for success."""


@attrs.frozen
class Question:
    """A command that appends results to `evaluations.jsonl`, under its own name."""

    command: EvaluateCommand
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
    "smoke": Question(smoke),
    "loss": Question(loss, "evaluation.loss.loss_measures"),
    "hellaswag": Question(hellaswag, "evaluation.hellaswag.accuracy_measures"),
    "instruct": Question(instruct, "evaluation.instruct.answer_measures"),
    "judge": Question(judge, "evaluation.judging.score_measures"),
    "harness": Question(harness, "evaluation.harness.task_measures"),
}
