"""Loops of trials on simulated losses: false keeps among changes that do nothing, and planted gains that are kept."""

import bench  # first: it makes the repository's modules importable
import numpy as np
from scipy import special

from evaluation.shared.significance import SOUGHT_DEVIATIONS
from experiments.trial.trial_rule import TrialRule, keep_level

CHANGES = 50  # of a loop
DEVIATION = 0.01  # of one run over seeds, nats per token


def main(*, loops: int = 1000, seed: int = 0) -> None:
    """Print loops without a gain, and loops with one at a place; the bound is Clopper and Pearson's of 95 %, 1934."""
    random = np.random.default_rng(seed)
    rows = []
    for noise in ("normal", "heavy"):
        ended = [loop(random, noise, None) for _ in range(loops)]
        false = sum(bool(kept) for kept, _ in ended)
        bound = special.betaincinv(false + 1, loops - false, 0.95)
        pairs = np.mean([pairs for _, pairs in ended]) / CHANGES
        lower = np.mean([difference(random, noise, 0.0, (CHANGES,)).min() < -2.5 * DEVIATION for _ in range(loops)])
        rows.append([noise, f"{false / loops:.1%}", f"{bound:.1%}", f"{pairs:.1f}", f"{lower:.1%}"])
    columns = ("false keep in", "at most", "pairs of a change", "'gain' > 2.5 deviations of a pair each")
    print(bench.table([f"loops of {CHANGES} null changes", *columns], rows))
    rows = []
    for place in (1, 5, 20, CHANGES):
        ended = [loop(random, "normal", place) for _ in range(loops)]
        rows.append([f"change {place}", f"{np.mean([place in kept for kept, _ in ended]):.1%}"])
    print()
    print(bench.table([f"a gain of {SOUGHT_DEVIATIONS:g} seed deviations is", "kept in"], rows))


def loop(random: np.random.Generator, noise: str, planted: int | None) -> tuple[list[int], int]:
    """Return the changes of a loop that are kept, from 1 on, and the pairs trained; `planted`: the one with a gain."""
    kept: list[int] = []
    trained = 0
    for number in range(1, CHANGES + 1):
        rule = TrialRule.of(keep_level(number, len(kept)), None)
        differences = difference(random, noise, SOUGHT_DEVIATIONS if number == planted else 0.0, rule.looks[-1:])
        for look in rule.looks:
            if (judgement := rule.judge(differences[:look].tolist())) is not None:
                kept += [number] * (judgement.verdict == "better")
                trained += look
                break
    return kept, trained


def difference(random: np.random.Generator, noise: str, gain: float, shape: tuple[int, ...]) -> np.ndarray:
    """Return losses of candidates less those of the base, in pairs; `gain`: in deviations of one run over seeds."""
    runs = random.standard_normal((2, *shape)) if noise == "normal" else random.standard_t(3, (2, *shape)) / np.sqrt(3)
    return DEVIATION * (runs[0] - runs[1] - gain)


if __name__ == "__main__":
    bench.run(main)
