"""Trials and loops of trials on simulated losses, by the distribution of a pair's difference.

    python benchmarks/trial_loops.py [--families 2400]

The first two tables have changes that do nothing: single trials, and loops of 50 changes. The last two have a gain of
three seed deviations. Differences are drawn here, without the program; `MANY`, `LOW` and `wide` mark cells that miss
the limits of error_grid.py.
"""

import bench  # first: it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, holds, percent

from experiments.trial.trial_rule import TrialRule, TrialVerdict, keep_level

CHANGES = 50  # of a loop
MOST = 40  # pairs that are drawn for a trial; no rule here wants more
GAIN = 3.0  # planted, in deviations of one run over seeds
KINDS = {
    "normal": "normal",
    "t": "Student's t, 2 degrees of freedom",
    "exponential": "exponential",
    "lognormal": "lognormal",
    "rare": "worse by 0.9 in 1 of 10, else better by 0.1, noise 0.05",
    "t3": "Student's t, 3 degrees of freedom",
}
DEVIATIONS = {"exponential": 1.0, "lognormal": np.sqrt((np.e - 1) * np.e), "rare": np.hypot(0.3, 0.05)}


def main(*, families: int = FAMILIES) -> None:
    """Print the four tables."""
    rows = []
    for cell, (kind, name) in enumerate(KINDS.items()):
        rows.append([name, *single(kind, families, generator("trial", cell))])
    columns = ["better", "worse", "in the interval", "pairs", f"gain of {GAIN:g} found", "with pairs"]
    print(bench.table(["single trials, no difference", *columns], rows), flush=True)
    rows = []
    for cell, (kind, name) in enumerate(KINDS.items()):
        random = generator("loop", cell)
        ended = [loop(random, kind, None) for _ in range(families)]
        false = sum(bool(kept) for kept, _ in ended)
        pairs = np.mean([pairs for _, pairs in ended]) / CHANGES
        lower = (difference(random, kind, (families, CHANGES)) / scale(kind)).min(axis=1) < -GAIN / np.sqrt(2)
        rows.append(
            [name, false_text(false, families), percent(false / families), f"{pairs:.1f}", percent(lower.mean())]
        )
    columns = ["false keep in", "share", "pairs of a change", f"one pair better by {GAIN:g}"]
    print("\n" + bench.table([f"loops of {CHANGES} null changes", *columns], rows), flush=True)
    rows = []
    for place in (1, 5, 20, CHANGES):
        random = generator("planted", place)
        found = [place in loop(random, "normal", place)[0] for _ in range(families)]
        rows.append([f"change {place}", percent(float(np.mean(found)))])
    print("\n" + bench.table([f"a gain of {GAIN:g} seed deviations, normal, is", "kept in"], rows))


def single(kind: str, families: int, random: np.random.Generator) -> list[str]:
    """Return the cells of single trials, each the first of its project."""
    rule = TrialRule.of(keep_level(1, 0), None)
    ended = [trial(rule, row) for row in difference(random, kind, (families, MOST)).tolist()]
    verdicts = [judgement.verdict for judgement, _ in ended]
    intervals = [judgement.difference for judgement, _ in ended if judgement.difference is not None]
    inside = sum(holds(one.low, one.high, 0.0) for one in intervals)
    planted = (difference(random, kind, (families, MOST)) - GAIN / np.sqrt(2) * scale(kind)).tolist()
    found = [trial(rule, row) for row in planted]
    return [
        false_text(verdicts.count("better"), families),
        false_text(verdicts.count("worse"), families),
        covered_text(inside, len(intervals)),
        f"{np.mean([pairs for _, pairs in ended]):.1f}",
        percent(float(np.mean([judgement.verdict == "better" for judgement, _ in found]))),
        f"{np.mean([pairs for _, pairs in found]):.1f}",
    ]


def trial(rule: TrialRule, differences: list[float]) -> tuple[TrialVerdict, int]:
    """Return the verdict of one trial, and the pairs it took."""
    for look in rule.looks:
        if (judgement := rule.judge(differences[:look])) is not None:
            return judgement, look
    raise AssertionError("the last look has a verdict")


def loop(random: np.random.Generator, kind: str, planted: int | None) -> tuple[list[int], int]:
    """Return the changes of a loop that are kept, from 1 on, and the pairs trained; `planted`: the one with a gain."""
    kept: list[int] = []
    trained = 0
    for number, row in enumerate(difference(random, kind, (CHANGES, MOST)), 1):
        rule = TrialRule.of(keep_level(number, len(kept)), None)
        gain = GAIN / np.sqrt(2) * scale(kind) if number == planted else 0.0
        judgement, pairs = trial(rule, (row - gain).tolist())
        kept += [number] * (judgement.verdict == "better")
        trained += pairs
    return kept, trained


def scale(kind: str) -> float:
    """Return the deviation of a pair's difference; of Student's t with few degrees of freedom, its scale."""
    return float(DEVIATIONS.get(kind, 1.0))


def difference(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return differences candidate - base of pairs, whose mean is 0."""
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
