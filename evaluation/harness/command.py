"""evaluate.py harness"""

from pathlib import Path
from typing import Annotated

import attrs

from common.arguments import option, whole_number
from common.errors import BadInput
from evaluation.shared.command_line import TIMEOUT_SECONDS, Checkpoint, Device, Models, Tokenizer

REQUIREMENT = "lm_eval[hf]==0.4.13"


@attrs.frozen(kw_only=True)
class HarnessCommand:
    """Run tasks of lm-evaluation-harness, which must be installed."""

    tasks: Annotated[str, option("comma-separated names; `lm-eval ls tasks` lists them", name="TASKS")] = attrs.field(
        kw_only=False
    )
    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    include_path: Annotated[Path | None, option("directory of additional tasks, as YAML files", "DIR")] = None
    fewshot: Annotated[
        int | None, option("examples in the context; default: the task's", "N", check=whole_number(0))
    ] = None
    limit: Annotated[
        int | None, option("documents per task, for a trial; default: all", "N", check=whole_number(1))
    ] = None
    batch_size: Annotated[int, option("requests per batch", "N", check=whole_number(1))] = 16
    device: Device = None

    def run(self) -> None:
        """Print and store each model's metrics; under torchrun the ranks share the work."""
        try:
            import lm_eval
        except ImportError as error:
            raise BadInput(f'lm-evaluation-harness is not installed ({error}): pip install "{REQUIREMENT}"') from error
        from evaluation.harness.harness import Wanted, describe, measure
        from evaluation.shared.load import load_on_all, locate
        from evaluation.shared.results import append_result
        from training.parallel.process_group import from_coordinator, start, stop

        if self.include_path is not None and not self.include_path.is_dir():
            raise BadInput(
                f"--include-path {self.include_path}: no such directory; wanted one with tasks as YAML files"
            )
        ranks = start(self.device, TIMEOUT_SECONDS)
        wanted = Wanted(
            tasks=self.tasks.split(","),
            fewshot=self.fewshot,
            limit=self.limit,
            batch_size=self.batch_size,
            folder=self.include_path,
        )
        places = from_coordinator(ranks, lambda: [locate(model, self.checkpoint) for model in self.models])
        for place in places:
            found = measure(load_on_all(ranks, place, self.tokenizer), wanted, ranks)
            if ranks.coordinates:
                how = {"lm_eval": lm_eval.__version__, "fewshot": wanted.fewshot, "limit": wanted.limit}
                append_result(
                    place.home, place.title, "harness", {**how, "batch_size": wanted.batch_size, "tasks": found}
                )
                print(f"{place.path}:\n{describe(found)}")
        stop()
