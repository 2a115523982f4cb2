"""evaluate.py smoke"""

from typing import TYPE_CHECKING, Annotated, Any

import attrs

from common.arguments import option
from common.checks import integer, number
from common.errors import BadInput
from common.json_files import check_text
from evaluation.shared.command_line import MeasureCommand

if TYPE_CHECKING:
    from evaluation.shared.load import Trained
    from training.parallel.process_group import Ranks


LEAST_TEMPERATURE = 1e-3  # below, logits divided by it leave fp32


def _temperature(text: str) -> float:
    value = number(0, 1e3).parse(text)
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"got {value:g}, wanted 0, which is greedy, or a number from {LEAST_TEMPERATURE:g}")
    return value


@attrs.frozen(kw_only=True)
class SmokeCommand(MeasureCommand):
    """Generate continuations of fixed prompts, or of your own."""

    prompt: Annotated[tuple[str, ...], option("replaces the fixed prompts; may be repeated", "TEXT")] = ()
    tokens: Annotated[
        int | None, option("tokens to generate; default: 40, or half of a short context", "N", check=integer(1))
    ] = None
    temperature: Annotated[float, option("sampling temperature; 0: greedy only", "T", check=_temperature)] = 1.0
    top_k: Annotated[int, option("sampling candidates for each token", "K", check=integer(1))] = 25
    seed: Annotated[int, option("sampling seed", "N", check=integer(0))] = 0

    def run(self) -> None:
        """Print and store each model's continuations."""
        from evaluation.smoke.smoke import smoke
        from model.generate import Sampling

        for text in self.prompt:
            check_text(text, "--prompt")
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)
        problems: list[str] = []

        def measure(trained: "Trained", _: None, ranks: "Ranks") -> tuple[dict[str, Any], str]:
            said = smoke(trained, self.prompt, self.tokens, sampling, ranks)
            problems.extend(f"{trained.place.path}: degenerate output: {one.problem}" for one in said if one.problem)
            values = {"top_k": self.top_k, "seed": self.seed, "said": [attrs.asdict(one) for one in said]}
            return values, "".join(f"\n{one}" for one in said)

        self.measure_each("smoke", lambda _: None, measure)
        if problems:
            raise BadInput(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
