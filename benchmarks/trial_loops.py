"""Trials and loops of trials on simulated losses, for several distributions of a pair's difference.

    python benchmarks/trial_loops.py [--families 2400]

The first table has single trials, of changes that do nothing and of changes with a gain of three seed deviations. The
second table has loops of 50 changes that do nothing. The third table has loops in which one change has a gain of three
seed deviations. Differences are drawn at random, without training. `MANY`, `LOW` and `wide` mark cells outside the
limits of error_grid.py.
"""

import bench  # imported first, because it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, holds, percent

from experiments.trial.trial_rule import TrialRule, TrialVerdict, keep_level

CHANGES = 50  # changes in a loop
MOST = 40  # pairs that are drawn for a trial; no rule in this benchmark needs more
GAIN = 3.0  # planted gain; its unit is the standard deviation of a run's loss over seeds
KINDS = {
    "normal": "normal",
    "t": "Student's t, 2 degrees of freedom",
    "exponential": "exponential",
    "lognormal": "lognormal",
    "rare": "worse by 0.9 in 1 pair of 10, otherwise better by 0.1; noise 0.05",
    "t3": "Student's t, 3 degrees of freedom",
}
DEVIATIONS = {"exponential": 1.0, "lognormal": np.sqrt((np.e - 1) * np.e), "rare": np.hypot(0.3, 0.05)}


def main(*, families: int = FAMILIES) -> None:
    """Print the three tables."""
    rows = []
    for cell, (kind, name) in enumerate(KINDS.items()):
        rows.append([name, *single(kind, families, generator("trial", cell))])
    columns = ["better", "worse", "in the interval", "pairs", f"gain of {GAIN:g} found", "with pairs"]
    print(bench.table(["single trials, no difference", *columns], rows), flush=True)
    rows = []
    for cell, (kind, name) in enumerate(KINDS.items()):
        random = generator("loop", cell)
        loops = [loop(random, kind, None) for _ in range(families)]
        false = sum(bool(gains) for gains, _ in loops)
        pairs = np.mean([pairs for _, pairs in loops]) / CHANGES
        lower = (difference(random, kind, (families, CHANGES)) / scale(kind)).min(axis=1) < -GAIN / np.sqrt(2)
        rows.append(
            [name, false_text(false, families), percent(false / families), f"{pairs:.1f}", percent(lower.mean())]
        )
    columns = ["false keep in", "share", "pairs per change", f"one pair better by {GAIN:g}"]
    print("\n" + bench.table([f"loops of {CHANGES} null changes", *columns], rows), flush=True)
    rows = []
    for change in (1, 5, 20, CHANGES):
        random = generator("planted", change)
        detected = [change in loop(random, "normal", change)[0] for _ in range(families)]
        rows.append([f"change {change}", percent(float(np.mean(detected)))])
    print("\n" + bench.table([f"a gain of {GAIN:g} seed deviations, normal, is", "kept in"], rows))


def single(kind: str, families: int, random: np.random.Generator) -> list[str]:
    """Return the cells for single trials. Each trial is the first one of its project."""
    rule = TrialRule.of(keep_level(1, 0), None)
    null_trials = [trial(rule, row) for row in difference(random, kind, (families, MOST)).tolist()]
    verdicts = [judgment.verdict for judgment, _ in null_trials]
    intervals = [judgment.difference for judgment, _ in null_trials if judgment.difference is not None]
    inside = sum(holds(interval.low, interval.high, 0.0) for interval in intervals)
    planted = (difference(random, kind, (families, MOST)) - GAIN / np.sqrt(2) * scale(kind)).tolist()
    planted_trials = [trial(rule, row) for row in planted]
    return [
        false_text(verdicts.count("better"), families),
        false_text(verdicts.count("worse"), families),
        covered_text(inside, len(intervals)),
        f"{np.mean([pairs for _, pairs in null_trials]):.1f}",
        percent(float(np.mean([judgment.verdict == "better" for judgment, _ in planted_trials]))),
        f"{np.mean([pairs for _, pairs in planted_trials]):.1f}",
    ]


def trial(rule: TrialRule, differences: list[float]) -> tuple[TrialVerdict, int]:
    """Return the verdict of one trial, and the number of pairs that it needed."""
    for look in rule.looks:
        if (judgment := rule.judge(differences[:look])) is not None:
            return judgment, look
    raise AssertionError("the last look has a verdict")


def loop(random: np.random.Generator, kind: str, planted: int | None) -> tuple[list[int], int]:
    """Return the numbers of the changes that a loop keeps, counted from 1, and the number of trained pairs.

    `planted` is the number of the change that has a gain.
    """
    gains: list[int] = []
    trained_pairs = 0
    for number, row in enumerate(difference(random, kind, (CHANGES, MOST)), 1):
        rule = TrialRule.of(keep_level(number, len(gains)), None)
        gain = GAIN / np.sqrt(2) * scale(kind) if number == planted else 0.0
        judgment, pairs = trial(rule, (row - gain).tolist())
        gains += [number] * (judgment.verdict == "better")
        trained_pairs += pairs
    return gains, trained_pairs


def scale(kind: str) -> float:
    """Return the unit of planted gains: the standard deviation of a pair's difference.

    For Student's t with few degrees of freedom, the unit is the scale of the distribution instead.
    """
    return float(DEVIATIONS.get(kind, 1.0))


def difference(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random differences (candidate - base) of pairs. The distribution has the mean 0."""
    if kind == "normal":
        return random.standard_normal(shape)
    if kind in ("t", "t3"):
        return random.standard_t(2 if kind == "t" else 3, shape)
    if kind == "exponential":
        return random.standard_exponential(shape) - 1
    if kind == "lognormal":
        return np.exp(random.standard_normal(shape)) - np.exp(0.5)
    return np.where(random.random(shape) < 0.1, 0.9, -0.1) + 0.05 * random.standard_normal(shape)


if __name__ == "__main__":
    bench.run(main)
