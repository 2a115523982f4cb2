"""evaluate.py harness"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs

from common.arguments import option
from common.checks import integer
from common.errors import BadInput
from evaluation.shared.command_line import MeasureCommand, Models

if TYPE_CHECKING:
    from evaluation.shared.load import Trained
    from training.parallel.process_group import Ranks

REQUIREMENT = "lm_eval[hf]==0.4.13"


@attrs.frozen(kw_only=True)
class HarnessCommand(MeasureCommand):
    """Run tasks of lm-evaluation-harness, which must be installed."""

    tasks: Annotated[str, option("comma-separated names; `lm-eval ls tasks` lists them", name="TASKS")] = attrs.field(
        kw_only=False
    )
    models: Models = attrs.field(kw_only=False)
    include_path: Annotated[Path | None, option("directory of additional tasks, as YAML files", "DIR")] = None
    fewshot: Annotated[int | None, option("examples in the context; default: the task's", "N", check=integer(0))] = None
    limit: Annotated[int | None, option("documents per task, for a trial; default: all", "N", check=integer(1))] = None
    batch_size: Annotated[int, option("requests per batch", "N", check=integer(1))] = 16

    def run(self) -> None:
        """Print and store each model's metrics."""
        try:
            import lm_eval
        except ImportError as error:
            raise BadInput(f'lm-evaluation-harness is not installed ({error}): pip install "{REQUIREMENT}"') from error
        if self.include_path is not None and not self.include_path.is_dir():
            raise BadInput(
                f"--include-path {self.include_path}: no such directory; wanted one with tasks as YAML files"
            )
        from evaluation.harness.harness import describe, measure

        how = {
            "lm_eval": lm_eval.__version__,
            "fewshot": self.fewshot,
            "limit": self.limit,
            "batch_size": self.batch_size,
        }

        def measured(trained: "Trained", _: None, ranks: "Ranks") -> tuple[dict[str, Any], str]:
            found = measure(trained, self, ranks)
            return {**how, "tasks": found}, f"\n{describe(found)}"

        self.measure_each("harness", lambda _: None, measured)
