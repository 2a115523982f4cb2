"""Ladder of recipes from GPT-2 with AdamW on: levers, the tuning of their rates, and the gain of each."""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Any

import attrs
import numpy as np
from recipe_runs import RATES, TUNING_SEEDS, Recipe, Trainer, Training

from evaluation.shared.intervals import CONFIDENCE, Interval, student_interval
from experiments.shared.interior_optimum import best_rate, find_optimum

COARSE, FINE = (2.0, math.sqrt(2.0)), (math.sqrt(2.0),)  # factors between rates: first these, then those
SMALLEST_SHARE = 1 / 16  # of the steps, in the search for the first recipe's loss
PLAIN = Recipe(
    model={"qkv_bias": True, "tie_weights": True},
    train={
        "learning_rate": 0.004,
        "schedule_learning_rate": True,
        "warmup_period_percent": 10,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "clipping_max_norm": 1.0,
    },
)


@attrs.frozen(kw_only=True)
class Lever:
    """A change of a recipe."""

    name: str
    tuned: tuple[str, ...]  # rates, one after the other
    model: dict[str, Any] = attrs.field(factory=dict)
    train: dict[str, Any] = attrs.field(factory=dict)
    new_rates: dict[str, tuple[str, float]] = attrs.field(factory=dict)  # rate: starts at a multiple of another one


LEVERS = (
    Lever(
        name="+ RoPE, RMSNorm",
        tuned=("learning_rate",),
        model={"positions": "rope", "norm": "rmsnorm", "norm_gain": False, "biases": False, "qkv_bias": False},
    ),
    Lever(
        name="+ Muon",
        tuned=("matrix_learning_rate", "learning_rate"),
        train={"optimizer": "muon", "muon_split_qkv": True},
        new_rates={"matrix_learning_rate": ("learning_rate", 4.0)},
    ),
    Lever(
        name="+ QK-norm, ReLU²",
        tuned=("matrix_learning_rate", "learning_rate"),
        model={"qk_norm": True, "activation": "relu2"},
    ),
    Lever(
        name="+ zero-initialized, untied",
        tuned=("head_learning_rate", "learning_rate", "matrix_learning_rate"),
        model={
            "tie_weights": False,
            "embedding_norm": True,
            "zero_init_projections": True,
            "zero_init_head": True,
        },
        new_rates={"head_learning_rate": ("learning_rate", 1.0)},
    ),
    Lever(
        name="+ schedule",
        tuned=("matrix_learning_rate", "learning_rate"),
        train={"schedule_learning_rate": "warmup_stable_decay", "decay_period_percent": 70},
    ),
    Lever(name="+ softcap", tuned=("matrix_learning_rate",), model={"logit_softcap": 15.0}),
)


@attrs.frozen(kw_only=True)
class Rung:
    """A recipe with tuned rates, beside the best one before it. Losses: one for each seed."""

    name: str
    recipe: Recipe
    losses: list[float]  # at equal tokens
    equal_time_losses: list[float]  # in the CPU seconds of the first recipe
    step_seconds: float  # CPU time, as a share of the first recipe's
    gain: Interval | None = None  # of the lever: the loss before less the loss with it; None: the first recipe
    gain_at_equal_time: Interval | None = None

    @property
    def stays(self) -> bool:
        """True if the lever helps, outside seed noise."""
        return self.gain_at_equal_time is None or (self.gain_at_equal_time.low or 0.0) > 0


class Ladder:
    """Climbs from the first recipe, lever by lever."""

    def __init__(self, trainer: Trainer, steps: int, seeds: int = 3):
        self._trainer, self._steps = trainer, steps
        self.seeds = range(TUNING_SEEDS[0], TUNING_SEEDS[0] + seeds)

    def climb(self) -> list[Rung]:
        """Return the first recipe and a rung for each lever, whether it stays or not."""
        best = self._first()
        rungs = [best]
        for lever in LEVERS:
            rungs.append(self._try(lever, rungs[0], best))
            if rungs[-1].stays:
                best = rungs[-1]
        return rungs

    def jump(self, levers: Sequence[Lever], share: float) -> tuple[Rung, Recipe, float]:
        """Return the first recipe, one with all levers, tuned at a share of the steps, and its seconds a step.

        Seconds are CPU time, as a share of the first recipe's.
        """
        first = self._first()
        recipe = first.recipe
        for lever in levers:
            recipe = _pulled(lever, recipe)
        for factors in (COARSE, FINE):  # twice: the best rate of one depends on the others
            for key in RATES:
                if key in recipe.train:
                    recipe = self._tuned(recipe, key, factors, share)
        seconds, of_first = self._trainer.step_seconds([recipe, first.recipe])
        return first, recipe, seconds / of_first

    def losses(self, recipe: Recipe, share: float) -> list[float]:
        """Return the final loss for each seed, on that share of the steps."""
        return self._trainer.losses([self._training(recipe, seed, share) for seed in self.seeds])

    def share_to_reach(self, rung: Rung, target: float) -> float | None:
        """Return the share of the tokens on which the mean loss is the target; None: more than all.

        Between whole runs of all steps, a half, a quarter, ...: linear in the logarithm of the tokens. At
        SMALLEST_SHARE the search ends.
        """
        share, loss = 1.0, fmean(rung.losses)
        if loss > target:
            return None
        while share > SMALLEST_SHARE:
            half = fmean(self.losses(rung.recipe, share / 2))
            if half > target:
                return float(share / 2 ** ((target - loss) / (half - loss)))
            share, loss = share / 2, half
        return share

    def _first(self) -> Rung:
        """Return GPT-2 with AdamW, its rate tuned."""
        recipe = self._tuned(PLAIN, "learning_rate", COARSE)
        losses = self.losses(recipe, 1.0)
        return Rung(name="GPT-2, AdamW", recipe=recipe, losses=losses, equal_time_losses=losses, step_seconds=1.0)

    def _try(self, lever: Lever, plain: Rung, best: Rung) -> Rung:
        """Return the best recipe so far with a lever, its rates tuned."""
        recipe = _pulled(lever, best.recipe)
        for key in lever.tuned:
            if key in recipe.train:
                recipe = self._tuned(recipe, key, COARSE if key in lever.new_rates else FINE)
        seconds, first = self._trainer.step_seconds([recipe, plain.recipe])
        losses, equal_time = self.losses(recipe, 1.0), self.losses(recipe, first / seconds)
        return Rung(
            name=lever.name,
            recipe=recipe,
            losses=losses,
            equal_time_losses=equal_time,
            step_seconds=seconds / first,
            gain=difference(best.losses, losses),
            gain_at_equal_time=difference(best.equal_time_losses, equal_time),
        )

    def _training(self, recipe: Recipe, seed: int, share: float) -> Training:
        return Training(recipe=recipe, seed=seed, steps=max(1, round(share * self._steps)))

    def _tuned(self, recipe: Recipe, key: str, factors: Sequence[float], share: float = 1.0) -> Recipe:
        """Return the recipe with the best value of one rate, by the mean loss over TUNING_SEEDS."""

        def measure(rates: list[float]) -> list[float]:
            tried = [recipe.changed({}, {key: rate}) for rate in rates]
            runs = [self._training(one, seed, share) for one in tried for seed in TUNING_SEEDS]
            means: list[float] = np.reshape(self._trainer.losses(runs), (len(rates), -1)).mean(1).tolist()
            return means

        return recipe.changed({}, {key: best_rate(find_optimum(measure, [recipe.train[key]], factors))})


def _pulled(lever: Lever, recipe: Recipe) -> Recipe:
    """Return the recipe with a lever, new rates at their starting values."""
    rates = {key: recipe.train[other] * factor for key, (other, factor) in lever.new_rates.items()}
    return recipe.changed(lever.model, lever.train | rates)


def difference(first: list[float], second: list[float]) -> Interval:
    """Return mean(first) - mean(second) of independent seeds, as many of each, by Student's t with pooled variance."""
    count = len(first)
    error = math.sqrt((variance(first) + variance(second)) / count)
    return student_interval(fmean(first) - fmean(second), error, 2 * count - 1, CONFIDENCE)
