"""evaluate.py smoke"""

from typing import TYPE_CHECKING, Annotated

import attrs

from common.arguments import number, option, whole_number
from common.errors import BadInput
from evaluation.shared.command_line import TIMEOUT_SECONDS, Checkpoint, Device, Models, Tokenizer

if TYPE_CHECKING:
    from evaluation.smoke.smoke import Continuation


@attrs.frozen(kw_only=True)
class SmokeCommand:
    """Generate continuations of fixed prompts, or of your own."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    prompt: Annotated[tuple[str, ...], option("replaces the fixed prompts; may be repeated", "TEXT")] = ()
    tokens: Annotated[
        int | None, option("tokens to generate; default: 40, or half of a short context", "N", check=whole_number(1))
    ] = None
    temperature: Annotated[float, option("sampling temperature; 0: greedy only", "T", check=number(0))] = 1.0
    top_k: Annotated[int, option("sampling candidates for each token", "K", check=whole_number(1))] = 25
    seed: Annotated[int, option("sampling seed", "N", check=whole_number(0))] = 0
    device: Device = None

    def run(self) -> None:
        """Print and store each model's continuations; under torchrun the ranks share the prompts."""
        from evaluation.shared.load import load_on_all, locate
        from evaluation.shared.results import append_result
        from evaluation.smoke.smoke import smoke
        from model.generate import Sampling
        from training.parallel.process_group import from_coordinator, start, stop

        ranks = start(self.device, TIMEOUT_SECONDS)
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)
        places = from_coordinator(ranks, lambda: [locate(model, self.checkpoint) for model in self.models])
        problems = []
        for place in places:
            trained = load_on_all(ranks, place, self.tokenizer)
            said = smoke(trained, list(self.prompt) or None, self.tokens, sampling, ranks)
            problems += [f"{place.path}: degenerate output: {item.problem}" for item in said if item.problem]
            if ranks.coordinates:
                values = {"top_k": sampling.top_k, "seed": sampling.seed}
                append_result(
                    place.home, place.title, "smoke", values | {"said": [attrs.asdict(item) for item in said]}
                )
                print(f"{place.path}:\n{_shown(said)}")
        stop()
        if problems:
            raise BadInput(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def _shown(said: list["Continuation"]) -> str:
    lines = []
    for item in said:
        way = "greedy" if item.temperature == 0 else f"temperature {item.temperature:g}"
        lines.append(f"[{way}] {item.prompt}{item.text}")
    return "\n".join(lines)
