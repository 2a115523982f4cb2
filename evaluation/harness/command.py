"""Options of evaluate.py harness."""

from pathlib import Path
from typing import Annotated

import attrs

from common.arguments import option
from common.checks import integer
from evaluation.shared.command_line import MeasureOptions, Models


@attrs.frozen(kw_only=True)
class HarnessCommand(MeasureOptions):
    """Run tasks of lm-evaluation-harness, which must be installed."""

    tasks: Annotated[str, option("comma-separated names; `lm-eval ls tasks` lists them", name="TASKS")] = attrs.field(
        kw_only=False
    )
    models: Models = attrs.field(kw_only=False)
    include_path: Annotated[Path | None, option("directory of additional tasks, as YAML files", "DIR")] = None
    fewshot: Annotated[int | None, option("examples in the context; default: the task's", "N", check=integer(0))] = None
    limit: Annotated[int | None, option("documents per task, for a trial; default: all", "N", check=integer(1))] = None
    batch_size: Annotated[int, option("requests per batch", "N", check=integer(1))] = 16
