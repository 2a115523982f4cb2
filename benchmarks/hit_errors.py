"""Error rates of CORE: for tasks with nearly only hits or nearly only misses, for means, and for differences.

    python benchmarks/hit_errors.py [--families 2400]

Whether an item is hit is random and independent of other items. In the last rows of the first table, groups of five
items share a passage, which determines half of the variance in their difficulty. CORE treats items as independent, so
these rows show the error rate if that assumption is wrong.
"""

import itertools

import bench  # imported first, because it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, holds
from scipy import special

from evaluation.core.core_scores import CoreSample, Parts, core_difference, sum_of_means, task_parts, task_score
from evaluation.shared.significance import student_interval

ITEMS, RATES = (20, 60, 200, 1000), (0.0, 0.005, 0.02, 0.1, 0.5, 0.98, 1.0)
BASELINE, TASKS, PASSAGE = 0.25, 22, 5


def main(*, families: int = FAMILIES) -> None:
    """Print the three tables."""
    rows = []
    for cell, (items, rate) in enumerate(itertools.product(ITEMS, RATES)):
        hits = generator("task", cell).random((families, items)) < rate
        rows.append(
            [
                f"{items:,} items, {rate:.1%} hit",
                covered_text(count_covered([[task] for task in hits], [rate]), families),
            ]
        )
    for cell, items in enumerate((60, 200, 1000)):
        hits = passages(generator("passage", cell), (families, items))
        text = covered_text(count_covered([[task] for task in hits], [0.5]), families)
        rows.append([f"{items:,} items, 50.0% hit, {PASSAGE} share a passage", text])
    print(bench.table(["one task", "covered"], rows), flush=True)
    rows = []
    for cell, items in enumerate(ITEMS):
        random, rates = generator("tasks", cell), np.linspace(0, 0.9, TASKS)
        rates[: TASKS // 2] = 0.003  # a small model misses nearly all items of many tasks
        hits = random.random((families, TASKS, items)) < rates[:, None]
        coverage = covered_text(count_covered(list(hits), list(rates)), families)
        rows.append([f"{TASKS} tasks of {items:,} items", coverage])
    print("\n" + bench.table(["mean over tasks", "covered"], rows), flush=True)
    rows = []
    for cell, (items, share) in enumerate(itertools.product(ITEMS, (0.0, 0.005, 0.02, 0.1))):
        random = generator("pair", cell)
        same = random.random((families, items)) < 0.5
        flipped = random.random((2, families, items)) < share / 2  # independently for each model
        sides = [same ^ flips for flips in flipped]
        pairs = [
            ([CoreSample(parts([a]), False)], [CoreSample(parts([b]), False)]) for a, b in zip(*sides, strict=True)
        ]
        apart = sum(core_difference(first, second, 0.95).excludes_zero for first, second in pairs)
        rows.append([f"{items:,} items, {share:.1%} differ", false_text(apart, families)])
    print("\n" + bench.table(["two equal models", "apart in"], rows))


def parts(tasks: list[np.ndarray]) -> Parts:
    """Return each task's part of the CORE score, computed from the task's hits."""
    bits = np.linspace(1, 2, len(tasks[0]))
    scores = {f"t{number}": task_score(f"{number}.jsonl", BASELINE, hits, bits) for number, hits in enumerate(tasks)}
    return task_parts(scores)[0]


def count_covered(models: list[list[np.ndarray]], rates: list[float]) -> int:
    """Return the number of models whose 95% interval for the mean over tasks contains the true mean."""
    truth = float(np.mean([(rate - BASELINE) / (1 - BASELINE) for rate in rates]))
    intervals = [student_interval(*sum_of_means(parts(list(tasks)))) for tasks in models]
    return sum(holds(interval.low, interval.high, truth) for interval in intervals)


def passages(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return hits with a rate of one half. The items of a passage are correlated.

    An item is a hit if a normal score is below 0. Half of the score's variance is the same for the whole passage.
    """
    families, items = shape
    shared = np.repeat(random.standard_normal((families, items // PASSAGE)), PASSAGE, axis=1)
    return special.ndtr((shared + random.standard_normal(shape)) / np.sqrt(2)) < 0.5


if __name__ == "__main__":
    bench.run(main)
