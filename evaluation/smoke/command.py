"""Options of evaluate.py smoke."""

from typing import Annotated

import attrs

from common.arguments import option
from common.checks import integer, number
from evaluation.shared.command_line import MeasureOptions

LEAST_TEMPERATURE = 1e-3  # below, logits divided by it leave fp32


def _temperature(text: str) -> float:
    value = number(0, 1e3).parse(text)
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"got {value:g}, wanted 0, which is greedy, or a number from {LEAST_TEMPERATURE:g}")
    return value


@attrs.frozen(kw_only=True)
class SmokeCommand(MeasureOptions):
    """Generate continuations of fixed prompts, or of your own."""

    prompt: Annotated[tuple[str, ...], option("replaces the fixed prompts; may be repeated", "TEXT")] = ()
    tokens: Annotated[
        int | None, option("tokens to generate; default: 40, or half of a short context", "N", check=integer(1))
    ] = None
    temperature: Annotated[float, option("sampling temperature; 0: greedy only", "T", check=_temperature)] = 1.0
    top_k: Annotated[int, option("sampling candidates for each token", "K", check=integer(1))] = 25
    seed: Annotated[int, option("sampling seed", "N", check=integer(0))] = 0
