"""Spot machines: simulated runs with preemptions beside the expected time that --plan shows, and Young's interval.

python benchmarks/preempted_runs.py [--runs 1000]

Each run of ten hours of training is preempted at random moments, without notice. Column "stands still" simulates what
the formula assumes: training waits for each save. "goes on" simulates what Lockstep does: training goes on while a
checkpoint is written, which counts once it is on the disk.
"""

import math
from collections.abc import Callable
from itertools import product

import attrs
import bench
import numpy as np
from tabulate import tabulate

from training.planning.price_list import Preemptions

WORK, START_UP = 36_000.0, 120.0  # seconds
RATES, SAVES, INTERVALS = (0.1, 0.47, 2.0), (5.0, 60.0), (300.0, 900.0, 3600.0)
HEADS = ["an hour", "save, s", "interval, s", "formula, hours", "stands still", "off", "goes on"]


def standing_still(setting: Preemptions, generator: np.random.Generator) -> float:
    """Return the seconds of one run whose training waits for each save."""
    return _run(setting, generator, WORK / setting.segments + setting.checkpoint_seconds, 0.0)


def going_on(setting: Preemptions, generator: np.random.Generator) -> float:
    """Return the seconds of one run whose checkpoints are written while it trains; it waits for the last one."""
    return _run(setting, generator, WORK / setting.segments, setting.checkpoint_seconds)


def _run(setting: Preemptions, generator: np.random.Generator, segment: float, behind: float) -> float:
    """Return the seconds of one run: segments, each saved so many seconds after its end."""
    paid, saved = 0.0, 0
    while True:
        lifetime = generator.exponential(3600 / setting.per_hour)
        needed = START_UP + (setting.segments - saved) * segment + behind
        if lifetime >= needed:
            return paid + needed
        paid += lifetime
        saved += max(0, math.floor((lifetime - START_UP - behind) / segment))


def simulate(
    run: Callable[[Preemptions, np.random.Generator], float], setting: Preemptions, runs: int
) -> tuple[float, float]:
    """Return the mean of so many runs, in hours, and its standard error; the seed is fixed."""
    generator = np.random.default_rng(42)
    hours = np.array([run(setting, generator) for _ in range(runs)]) / 3600
    return float(hours.mean()), float(hours.std(ddof=1) / math.sqrt(runs))


def main(*, runs: int = 1000) -> None:
    """Print both tables."""
    expected, intervals = [], []
    for rate, save in product(RATES, SAVES):
        one = Preemptions(per_hour=rate, checkpoint_seconds=save, segments=1.0)
        for interval in INTERVALS:
            setting = attrs.evolve(one, segments=WORK / interval)
            hours = setting.seconds(START_UP, WORK) / 3600
            (still, error), (on, _) = (simulate(run, setting, runs) for run in (standing_still, going_on))
            off = f"{(still - hours) / error:+.1f} standard errors"
            expected.append([rate, save, interval, f"{hours:.2f}", f"{still:.2f}", off, f"{on:.2f}"])
        costs = {n: attrs.evolve(one, segments=n).seconds(START_UP, WORK) for n in range(1, 721)}
        best, young = min(costs, key=costs.__getitem__), one.best_interval_seconds()
        more = attrs.evolve(one, segments=WORK / young).seconds(START_UP, WORK) / costs[best] - 1
        intervals.append([rate, save, f"{WORK / best:.0f}", f"{young:.0f}", f"{more:+.2%}"])
    print(tabulate(expected, HEADS), "\n")
    print(tabulate(intervals, ["an hour", "save, s", "best interval, s", "Young's, s", "hours"]))


if __name__ == "__main__":
    bench.run(main)
