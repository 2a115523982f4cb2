"""evaluate.py hellaswag"""

from typing import TYPE_CHECKING, Annotated, Any

import attrs

from common.arguments import option
from common.checks import integer
from common.errors import printable
from evaluation.shared.command_line import MeasureCommand

if TYPE_CHECKING:
    from evaluation.hellaswag.items import Items
    from evaluation.shared.load import ModelLocation, Trained
    from training.parallel.process_group import Ranks

ITEMS = 10_042  # in the validation split
# karpathy/build-nanogpt, hellaswag.py: its own figures, and those of lm-evaluation-harness.
PUBLISHED = {
    "completion": ("convention of build-nanogpt and llm.c", 0.2859, 0.2955),
    "lm-eval": ("convention of lm-evaluation-harness", 0.2892, 0.3114),
}


@attrs.frozen(kw_only=True)
class HellaSwagCommand(MeasureCommand):
    """Accuracy on HellaSwag, by both published conventions."""

    data: Annotated[
        str,
        option("hellaswag_val.jsonl, or a dataset on the hub, whose validation split is used", "FILE|OWNER/NAME"),
    ] = "Rowan/hellaswag"
    count: Annotated[int | None, option("number of items, from the first; default: all", "N", check=integer(1))] = None

    def run(self) -> None:
        """Print and store each model's accuracies."""
        self.measure_each("hellaswag", self._read, _measure)

    def _read(self, _: "list[ModelLocation]") -> "Items":
        from evaluation.hellaswag.items import read_items

        data = read_items(self.data, self.count)
        print(printable(f"{data.file}: {len(data.items):,} items"))
        for name, (how, acc, acc_norm) in PUBLISHED.items():
            print(f"{name}: {how}; GPT-2 124M: acc {acc:.4f}, acc_norm {acc_norm:.4f} on all {ITEMS:,}")
        return data


def _measure(trained: "Trained", data: "Items", ranks: "Ranks") -> tuple[dict[str, Any], str]:
    from evaluation.hellaswag.hellaswag import measure

    result = measure(trained, data.items, ranks)
    return {"data": {"file": data.file, "sha256": data.sha256}, **attrs.asdict(result)}, f" {result}"
