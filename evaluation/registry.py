"""Registry of the commands of `evaluate.py`: each has a folder, and a line here.

Their options are in `evaluation/command_line.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

from evaluation.command_line import (
    CompareCommand,
    ExportCommand,
    HarnessCommand,
    HellaSwagCommand,
    InstructCommand,
    JudgeCommand,
    LossCommand,
    SmokeCommand,
)

if TYPE_CHECKING:
    from evaluation.shared.results import EvaluationResult


@attrs.frozen
class RegisteredCommand:
    """A command; of one that appends results to `evaluations.jsonl` under its own name, how the comparison reads them.

    Modules are imported at use: numpy and torch are heavy.
    """

    options: type  # frozen, of options; the docstring is the command's help
    module: str  # its `run` takes the options, and returns an exit status, None for success
    # Module whose `read_results` structures such a line. Of a damaged line, or another version's, it may raise
    # UNREADABLE of evaluation/comparison/rows.py. None: nothing to compare.
    measures: str | None = None

    def run(self, options: Any) -> int | None:
        return import_module(self.module).run(options)

    def read_results(self, record: dict[str, Any]) -> "list[EvaluationResult]":
        """Structure a stored result."""
        return import_module(self.measures).read_results(record) if self.measures else []


COMMANDS = {  # in the order of the comparison's columns
    "smoke": RegisteredCommand(SmokeCommand, "evaluation.smoke.smoke"),
    "loss": RegisteredCommand(LossCommand, "evaluation.loss.held_out_loss", "evaluation.loss.loss_measures"),
    "hellaswag": RegisteredCommand(
        HellaSwagCommand, "evaluation.hellaswag.hellaswag", "evaluation.hellaswag.hellaswag"
    ),
    "instruct": RegisteredCommand(
        InstructCommand, "evaluation.instruct.instruct", "evaluation.instruct.reference_scores"
    ),
    "judge": RegisteredCommand(JudgeCommand, "evaluation.judging.judge", "evaluation.judging.scores"),
    "harness": RegisteredCommand(HarnessCommand, "evaluation.harness.harness", "evaluation.harness.harness"),
    "compare": RegisteredCommand(CompareCommand, "evaluation.comparison.page"),
    "export": RegisteredCommand(ExportCommand, "evaluation.export.export"),
}
