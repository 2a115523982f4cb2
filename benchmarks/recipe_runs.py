"""Runs of one small network on real text by train.py, which differ in their recipe, seed and length."""

import hashlib
import json
import math
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Literal

import attrs
import command
from cyclopts import Parameter
from random_run import build, write_run

from common.errors import EXIT_DIVERGED, EXIT_DONE
from training.batch_finder.worker import take_steps
from training.config.train_config import load_run
from training.parallel.process_group import start, stop
from training.telemetry.metrics_log import METRICS, read_metrics

TUNING_SEEDS = (42, 43)
RATES = {"learning_rate": "Adam", "matrix_learning_rate": "matrices", "head_learning_rate": "head"}
WARM_UP, TIMED_STEPS = 2, 20
BASE: dict[str, Any] = {
    "shuffle": True,
    "max_epochs": 100,
    "log_interval": 50,
    "determinism": "run",
    "require_stock_class": False,  # halfway between two classes
}


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Experiment:
    """Text, size of the network and of a step: the same for all recipes, and options of the command line."""

    tokens: Path | None = None
    """token files of another text"""
    vocabulary: int = 257
    """of their tokenizer"""
    layers: int = 2
    width: int = 128
    """a multiple of 32, the width of a head"""
    context: int = 128
    batch: int = 16
    """sequences of a step"""
    precision: Literal["fp32", "bf16"] = "fp32"
    validation: int = 512
    """sequences of a validation"""
    seeds: int = 3
    """of the losses that are compared; rates are tuned on two"""


@attrs.frozen(kw_only=True)
class Recipe:
    """Keys of model.json and train.json that a recipe sets."""

    model: dict[str, Any]
    train: dict[str, Any]

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of both files."""
        return self.model | self.train

    @property
    def rates(self) -> str:
        """Learning rates, for the table."""
        return ", ".join(f"{name} {self.train[key]:.3g}" for key, name in RATES.items() if key in self.train)

    def changed(self, model: dict[str, Any], train: dict[str, Any]) -> "Recipe":
        """Return the recipe with other keys on top."""
        return Recipe(model=self.model | model, train=self.train | train)


@attrs.frozen(kw_only=True)
class Training:
    """A run to be trained."""

    recipe: Recipe
    seed: int
    steps: int


class Trainer:
    """Trains runs in a folder, several at a time on a core each; none twice."""

    def __init__(self, folder: Path, experiment: Experiment, jobs: int):
        self._folder, self._experiment, self._jobs = folder, experiment, jobs

    def losses(self, trainings: list[Training]) -> list[float]:
        """Return the validation loss at the end of each run, in nats per token; infinite where it diverged."""
        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(self._loss, trainings))

    def step_seconds(self, recipes: list[Recipe]) -> list[float]:
        """Return the median CPU seconds of a step of each recipe: steps in turn, in this process."""
        ranks = start("cpu", 60)
        timed = [Training(recipe=recipe, seed=TUNING_SEEDS[0], steps=1000) for recipe in recipes]
        runs = [load_run(self._write(training), []) for training in timed]
        built = [build(run, ranks) for run in runs]
        seconds: list[list[float]] = [[] for _ in recipes]
        for _ in range(WARM_UP + TIMED_STEPS):
            for (state, settings), own in zip(built, seconds, strict=True):
                began = time.process_time()
                take_steps(state, settings, ranks, 1)
                own.append(time.process_time() - began)
        stop()
        return [median(own[WARM_UP:]) for own in seconds]

    def _loss(self, training: Training) -> float:
        run = self._write(training)
        loss = _final_loss(run, training.steps)
        if loss is None:
            if command.call("train.py", run, "--device", "cpu", statuses=(EXIT_DONE, EXIT_DIVERGED)):
                return math.inf
            loss = _final_loss(run, training.steps)
            assert loss is not None
            shutil.rmtree(run / "checkpoints")
        print(
            f"{run.name}: seed {training.seed}, {training.steps} steps, {training.recipe.rates}: {loss:.4f}",
            file=sys.stderr,
        )
        return loss

    def _write(self, training: Training) -> Path:
        """Write the run directory of a training, named by its keys, and return it."""
        experiment = self._experiment
        model = {
            "vocab_size": experiment.vocabulary,
            "context_length": experiment.context,
            "emb_dim": experiment.width,
            "n_heads": experiment.width // 32,
            "n_layers": experiment.layers,
        }
        train = {
            "dataset": str(experiment.tokens),
            "min_train_tokens": training.steps * experiment.batch * experiment.context,
            "microbatch_size": experiment.batch,
            "global_batch_size": experiment.batch,
            "precision": experiment.precision,
            "validation_sequences": experiment.validation,
            "random_seed": training.seed,
            "checkpoint_interval": training.steps,
            "validation_interval": training.steps,
        }
        keys = (model | training.recipe.model, BASE | train | training.recipe.train)
        name = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:12]
        return write_run(self._folder / name, *keys)


def _final_loss(run: Path, steps: int) -> float | None:
    """Return the validation loss after the last step, or None if the run has not come there."""
    records = read_metrics(run) if (run / METRICS).exists() else []
    validations = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    return validations.get(steps)
