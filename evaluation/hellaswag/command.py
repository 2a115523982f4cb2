"""evaluate.py hellaswag"""

from typing import Annotated

import attrs

from common.arguments import option, whole_number
from evaluation.shared.command_line import TIMEOUT_SECONDS, Checkpoint, Device, Models, Tokenizer

ITEMS = 10_042  # in the validation split
# karpathy/build-nanogpt, hellaswag.py: its own figures, and those of lm-evaluation-harness.
PUBLISHED = {
    "completion": ("convention of build-nanogpt and llm.c", 0.2859, 0.2955),
    "lm-eval": ("convention of lm-evaluation-harness", 0.2892, 0.3114),
}


@attrs.frozen(kw_only=True)
class HellaSwagCommand:
    """Accuracy on HellaSwag, by both published conventions."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    data: Annotated[
        str,
        option("hellaswag_val.jsonl, or a dataset on the hub, whose validation split is used", "FILE|OWNER/NAME"),
    ] = "Rowan/hellaswag"
    count: Annotated[
        int | None, option("number of items, from the first; default: all", "N", check=whole_number(1))
    ] = None
    device: Device = None

    def run(self) -> None:
        """Print and store each model's accuracies; under torchrun the ranks share the work."""
        from evaluation.hellaswag.hellaswag import describe, measure
        from evaluation.hellaswag.items import Items, read_items
        from evaluation.shared.load import ModelLocation, load_on_all, locate
        from evaluation.shared.results import append_result
        from training.parallel.process_group import from_coordinator, start, stop

        ranks = start(self.device, TIMEOUT_SECONDS)

        def prepare() -> tuple[list[ModelLocation], Items]:
            places = [locate(model, self.checkpoint) for model in self.models]
            return places, read_items(self.data, self.count)

        places, data = from_coordinator(ranks, prepare)
        if ranks.coordinates:
            print(f"{data.file}: {len(data.items):,} items")
            for name, (how, acc, acc_norm) in PUBLISHED.items():
                print(f"{name}: {how}; GPT-2 124M: acc {acc:.4f}, acc_norm {acc_norm:.4f} on all {ITEMS:,}")
        for place in places:
            result = measure(load_on_all(ranks, place, self.tokenizer), data.items, ranks)
            if ranks.coordinates:
                what = {"data": {"file": data.file, "sha256": data.sha256}}
                append_result(place.home, place.title, "hellaswag", what | attrs.asdict(result))
                cut = f"; {result.cut:,} items were cut to the context" if result.cut else ""
                print(
                    f"{place.path}: completion: {describe(result.completion)}; lm-eval: {describe(result.lm_eval)}{cut}"
                )
        stop()
