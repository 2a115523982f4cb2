"""Spot machines: simulated runs with preemptions, compared with the expected time of --plan and with Young's interval.

python benchmarks/preempted_runs.py [--runs 1000]

Each run of ten hours of training is preempted at random moments, without notice. The column "waits" simulates what the
formula assumes: training waits for each save. The column "continues" simulates what Lockstep does: training continues
while a checkpoint is written, and the checkpoint can be used once it is complete.
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
HEADS = ["per hour", "save, s", "interval, s", "formula, hours", "waits", "difference", "continues"]


def waiting_run(setting: Preemptions, generator: np.random.Generator) -> float:
    """Return the seconds of one run whose training waits for each save."""
    return _run(setting, generator, WORK / setting.segments + setting.checkpoint_seconds, 0.0)


def continuing_run(setting: Preemptions, generator: np.random.Generator) -> float:
    """Return the seconds of one run that trains during each save, and waits only for the last checkpoint."""
    return _run(setting, generator, WORK / setting.segments, setting.checkpoint_seconds)


def _run(setting: Preemptions, generator: np.random.Generator, segment: float, save_delay: float) -> float:
    """Return the seconds of one run made of segments. Each segment is saved `save_delay` seconds after it ends."""
    paid, saved = 0.0, 0
    while True:
        lifetime = generator.exponential(3600 / setting.per_hour)
        needed = START_UP + (setting.segments - saved) * segment + save_delay
        if lifetime >= needed:
            return paid + needed
        paid += lifetime
        saved += max(0, math.floor((lifetime - START_UP - save_delay) / segment))


def simulate(
    run: Callable[[Preemptions, np.random.Generator], float], setting: Preemptions, runs: int
) -> tuple[float, float]:
    """Simulate `runs` runs with a fixed seed. Return their mean time in hours, and its standard error."""
    generator = np.random.default_rng(42)
    hours = np.array([run(setting, generator) for _ in range(runs)]) / 3600
    return float(hours.mean()), float(hours.std(ddof=1) / math.sqrt(runs))


def main(*, runs: int = 1000) -> None:
    """Print both tables."""
    expected, intervals = [], []
    for rate, save in product(RATES, SAVES):
        unsaved = Preemptions(per_hour=rate, checkpoint_seconds=save, segments=1.0)
        for interval in INTERVALS:
            setting = attrs.evolve(unsaved, segments=WORK / interval)
            hours = setting.seconds(START_UP, WORK) / 3600
            (waiting, error), (continuing, _) = (simulate(run, setting, runs) for run in (waiting_run, continuing_run))
            difference = f"{(waiting - hours) / error:+.1f} standard errors"
            expected.append([rate, save, interval, f"{hours:.2f}", f"{waiting:.2f}", difference, f"{continuing:.2f}"])
        costs = {n: attrs.evolve(unsaved, segments=n).seconds(START_UP, WORK) for n in range(1, 721)}
        best, young = min(costs, key=costs.__getitem__), unsaved.best_interval_seconds()
        extra_time = attrs.evolve(unsaved, segments=WORK / young).seconds(START_UP, WORK) / costs[best] - 1
        intervals.append([rate, save, f"{WORK / best:.0f}", f"{young:.0f}", f"{extra_time:+.2%}"])
    print(tabulate(expected, HEADS), "\n")
    print(tabulate(intervals, ["per hour", "save, s", "best interval, s", "Young's, s", "extra time"]))


if __name__ == "__main__":
    bench.run(main)
