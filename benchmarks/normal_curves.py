"""How often a reference's band raises an alarm, for resampled normal runs and for short runs with a planted fault.

    python benchmarks/normal_curves.py  # seconds; needs only runs/quickstart/reference.json
    python benchmarks/normal_curves.py --tokens token_files/quickstart  # minutes; trains three faulty runs to 20%

A normal run is composed of pieces of runs that are left out of the reference. A faulty run follows the recipe of the
run directory, except for its fault, and must leave the band within a tenth of the run after the warm-up.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bench
import numpy as np
from scipy import special

from common.checks import structured
from common.errors import BadInput
from common.json_files import read_json
from evaluation.shared.significance import prediction_band
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.reference import MARKS, TENTH, Reference, tenths
from training.telemetry.curves import run_curves
from training.telemetry.metrics_log import REFERENCE, Metric, read_metrics

LEFT_OUT = 3  # number of runs from which a normal run is composed
# For each fault: factors for keys of train.json, and code that changes the targets of a step.
FAULTS: dict[str, tuple[dict[str, float], str]] = {
    "none": ({}, "pass"),
    "learning rate x 4": ({"learning_rate": 4}, "pass"),
    "batch cut to a quarter": ({"global_batch_size": 1 / 4}, "pass"),
    "labels shuffled": ({}, "targets = targets.flatten()[torch.randperm(targets.numel())].view_as(targets)"),
}
CHANGED_LABELS = """
import runpy, sys
sys.path.insert(0, ".")
import torch
from model.loss import NextTokenLoss
plain = NextTokenLoss.forward
def forward(self, tokens, targets, *others, **options):
    if self.training:
        {change}
    return plain(self, tokens, targets, *others, **options)
NextTokenLoss.forward = forward
runpy.run_path("train.py", run_name="__main__")
"""


def main(run: Path = Path("runs/quickstart"), *, runs: int = 1000, tokens: Path | None = None) -> None:
    """Print the share of normal runs with an alarm, and when each planted fault is noticed."""
    reference = structured(read_json(run / REFERENCE), Reference)
    alarms = false_alarms(reference, runs, np.random.default_rng(0))
    bound = special.betaincinv(alarms + 1, runs - alarms, 0.95)  # Clopper and Pearson, one-sided
    row = [f"{runs:,} resampled of {len(reference.losses)}", f"{alarms / runs:.1%}", f"{bound:.1%}"]
    print(bench.table(["normal runs", "outside at a mark", "upper bound, 95%"], [row]))
    if tokens is not None:
        print()
        rows = [[name, *planted(run, reference, tokens, *fault)] for name, fault in FAULTS.items()]
        print(bench.table(["planted", "a tenth after the warm-up", "noticed at"], rows))


def false_alarms(reference: Reference, runs: int, random: np.random.Generator) -> int:
    """Compose `runs` normal runs, and return how many of them leave the band at one or more marks.

    Each normal run is composed of LEFT_OUT runs of the reference, and the band is computed from all other runs.
    """
    losses, alarms = np.array(reference.losses), 0
    for _ in range(runs):
        order = random.permutation(len(losses))
        reference_losses, left_out = losses[order[LEFT_OUT:]], losses[order[:LEFT_OUT]]
        low, high = prediction_band(reference_losses, TENTH)
        length = random.integers(TENTH, MARKS + 1)  # number of marks in a piece
        pieces = random.integers(0, LEFT_OUT, MARKS)[(np.arange(MARKS) + random.integers(length)) // length]
        normal = left_out[pieces, np.arange(MARKS)]
        alarms += bool(((normal < low) | (normal > high)).any())
    return alarms


def planted(run: Path, reference: Reference, tokens: Path, factors: dict[str, float], change: str) -> list[str]:
    """Train a faulty run until the end of its warm-up, and then for another tenth of the run.

    Return the verdict at the end, and when the run left the band.
    """
    read = load_run(run, [])
    keys = read.train.flat()
    changed = [f"{key}={type(keys[key])(keys[key] * factor)}" for key, factor in factors.items()]
    changed += ["checkpoint_interval=1000000", "validation_interval=null", "random_seed=7"]
    plan = make_plan(load_run(run, changed).train, read.model.context_length, 1)
    share = (read.train.optimization.warmup_period_percent or 0) / 100 + TENTH / MARKS
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        place.mkdir()
        for name in ("model.json", "train.json"):
            shutil.copy(run / name, place)
        options = ["--device", "cpu", "--token-files", str(tokens), "--max-steps", str(round(share * plan.steps))]
        words = [sys.executable, "-c", CHANGED_LABELS.format(change=change), str(place), *options]
        words += [f"--set={setting}" for setting in changed]
        done = subprocess.run(words, cwd=bench.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BadInput(f"{place}: training failed: {done.stderr[-2000:]}")
        curve = run_curves(read_metrics(place))[Metric.TRAIN_LOSS]
    losses = tenths(curve, plan.steps)
    low, high = np.array(reference.band)[:, : len(losses)]
    sides = [("inside", "above", "below")[side] for side in (losses > high) * 1 - (losses < low)]
    first = next((mark for mark, side in enumerate(sides, start=1) if side != "inside"), None)
    return [sides[-1], "-" if first is None else f"{first / MARKS:.1%} of the run, {sides[first - 1]}"]


if __name__ == "__main__":
    bench.run(main)
