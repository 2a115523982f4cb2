"""Mixture of a sweep file: sources, and the weights of its runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput, quoted

PARTS = 4096  # of a weight: no two runs draw the same
MOST_RUNS = 1000
HELD_OUT = 0.2  # share of the runs
SPARE_RUNS = 4  # more than sources, without those held out: floor, exponent and noise


@attrs.frozen(kw_only=True)
class MixtureDesign:
    """Sources of training tokens, and their weights in each run: equal ones, each source alone, then any."""

    sources: tuple[str, ...]
    parts: np.ndarray  # weights in whole numbers, int64 (runs, sources)

    @property
    def weights(self) -> np.ndarray:
        """Weights that sum to 1, float64 (runs, sources)."""
        return self.parts / self.parts.sum(1, keepdims=True)

    def variants(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and changed key of each run."""
        for number, run in enumerate(self.parts.tolist()):
            pairs = zip(self.sources, run, strict=True)
            dataset = [{"dataset": source, "weight": weight} for source, weight in pairs if weight]
            yield f"mixture-{number:03}" if number else "equal-weights", {"train.dataset": dataset}


def held_out(runs: int) -> int:
    """Return the number of runs, the last ones, that a law of the others predicts first."""
    return max(2, round(HELD_OUT * runs))


def read_mixture(file: Path, values: Mapping[str, Any]) -> MixtureDesign | None:
    """Return the key `mixture` of a sweep file, None without it. Raises BadInput."""
    if (value := values.get("mixture")) is None:
        return None
    fine = isinstance(value, dict) and set(value) == {"sources", "runs"} and isinstance(value["sources"], list)
    fine = fine and all(isinstance(one, str) and one for one in value["sources"]) and type(value["runs"]) is int
    count = len(set(value["sources"])) if fine else 0
    enough = (runs for runs in range(count, MOST_RUNS) if runs - held_out(runs) >= count + SPARE_RUNS)
    least = next(enough, MOST_RUNS + 1)
    if not fine or count < 2 or count < len(value["sources"]) or not least <= value["runs"] <= MOST_RUNS:
        wanted = f'{{"sources": [DIR, DIR, ...], "runs": N}}, different ones, at least {least} runs'
        raise BadInput(f"{file}: mixture: got {quoted(value)}, wanted {wanted}")
    if values.get("measure") is None or {"levers", "halving"} & {key for key in values if values[key] is not None}:
        raise BadInput(
            f"{file}: mixture: wanted 'measure', the tokens to be good at, and neither 'levers' nor 'halving'"
        )
    drawn = np.random.default_rng(0).dirichlet(np.ones(count), value["runs"])  # uniform over all mixtures
    parts = np.round(PARTS * drawn).astype(np.int64)
    parts[0], parts[1 : count + 1] = 1, np.eye(count)
    return MixtureDesign(sources=tuple(value["sources"]), parts=parts)
