"""Error rates of a reference's band: how often good runs leave the band, and how often faulty runs are noticed.

    python benchmarks/band_errors.py [--families 2400]

As in reference.json, a run has 40 marks, and the loss at a mark is the mean over the tenth of the run that ends there.
There are four kinds of noise: noise that is new at each of 400 steps, an AR(1) series (coefficient 0.9 per step or per
mark), noise that is constant over a run (normal, or Student's t with 3 degrees of freedom), and a mixture that is half
new at each step and half constant.
In a faulty run, the loss is too high from the middle of the run to its end.
"""

import itertools

import bench  # imported first, because it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, percent, series

from evaluation.shared.significance import prediction_band

MARKS, APART, STEPS = 40, 4, 400  # APART is the number of marks in a tenth of a run
KINDS = (
    "new at each step",
    "AR(1) of 0.9 by step",
    "AR(1) of 0.9 by mark",
    "constant, normal",
    "constant, Student's t",
    "half new, half constant",
)
# By how much the loss of a faulty run is too high. The unit is the standard deviation of a mark's noise over runs.
FAULTS = (4.0, 8.0)


def main(*, families: int = FAMILIES) -> None:
    """Print a row for each combination of noise and number of runs."""
    rows = []
    for cell, (kind, runs) in enumerate(itertools.product(KINDS, (3, 5, 8))):
        random = generator("band", cell)
        outside, detected, widths = 0, [0] * len(FAULTS), []
        deviation = float(noise(kind, random, (2000,))[:, -1].std())
        fall = 3 + 4 * np.arange(1, MARKS + 1) ** -0.5
        for _ in range(families):
            losses = fall + noise(kind, random, (runs + 1,))
            low, high = prediction_band(losses[:-1], APART)
            new = losses[-1]
            outside += bool(((new < low) | (new > high)).any())
            widths.append(float(np.mean(high - low)) / 2 / deviation)
            for number, fault in enumerate(FAULTS):
                faulty = new + fault * deviation * (np.arange(MARKS) >= MARKS // 2)
                detected[number] += bool((faulty > high).any())
        rows.append(
            [
                f"{kind}, {runs} runs",
                false_text(outside, families),
                covered_text(families - outside, families),
                f"{np.median(widths):.1f}",
                *(percent(count / families) for count in detected),
            ]
        )
    columns = ["outside", "inside", "half width, deviations", *(f"fault of {fault:g} found" for fault in FAULTS)]
    print(bench.table(["noise, runs of the reference", *columns], rows))


def noise(kind: str, random: np.random.Generator, shape: tuple[int]) -> np.ndarray:
    """Return the noise of the loss at each mark, with the shape (*shape, MARKS)."""
    if kind == "AR(1) of 0.9 by mark":
        return series(random, (*shape, MARKS), 0.9)
    constant = np.zeros((*shape, 1))
    if kind.startswith("constant"):
        constant = random.standard_t(3, (*shape, 1)) if "Student" in kind else random.standard_normal((*shape, 1))
        return constant + np.zeros((*shape, MARKS))
    by_step = series(random, (*shape, STEPS), 0.9 if kind.startswith("AR") else 0.0)
    sums = np.cumsum(np.concatenate([np.zeros((*shape, 1)), by_step], axis=-1), axis=-1)
    ends = np.arange(1, MARKS + 1) * (STEPS // MARKS)
    starts = np.maximum(ends - APART * (STEPS // MARKS), 0)
    means = (sums[..., ends] - sums[..., starts]) / (ends - starts)
    if kind.startswith("half"):
        return means + random.standard_normal((*shape, 1)) * float(np.sqrt(1 / (APART * STEPS / MARKS)))
    return means


if __name__ == "__main__":
    bench.run(main)
