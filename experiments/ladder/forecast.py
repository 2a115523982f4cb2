"""Forecasts from a ladder's law: the loss of a target run, with its interval, and the best size for a budget."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.files import check_replaceable
from common.json_files import utc_now
from common.text import dollars, paid_seconds
from evaluation.shared.significance import Interval
from experiments.ladder.loss_law import HeldOut, LawFit
from experiments.shared.experiment_files import write_or_remove
from model.config import ModelConfig, shard_counts
from model.counts import matmul_parameter_count
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.data.locate_tokens import lengths_at_hand
from training.hardware.environment import git_commit
from training.planning.estimate import ASSUMED_START_UP_SECONDS
from training.planning.forecast_file import FORECAST, forecast_recipe
from training.planning.memory_model import MemoryModel, gpu_bytes
from training.planning.plan_table import ESTIMATE_CAUTION
from training.planning.price_list import Machine, PriceList
from training.planning.throughput import ESTIMATE, roofline, throughputs

# Simulations have tested the intervals up to this ratio: a target's compute / the compute of the ladder's largest run
MOST_EXTRAPOLATION = 30.0
BEYOND = 8  # the widest shape of a family is at most this many times as wide as the ladder's widest size
BEST_SHOWN = 4  # the best sizes are printed for at most this many machines


@attrs.frozen(kw_only=True)
class Forecast:
    """The forecast of a target run."""

    run: Run
    fit: LawFit
    held_out: HeldOut
    parameters: int  # N in the law
    tokens: int  # D in the law
    loss: Interval

    @classmethod
    def of(cls, run: Run, fit: LawFit, held_out: HeldOut) -> "Forecast":
        parameters, tokens = matmul_parameter_count(run.model), target_tokens(run)
        loss = fit.predict(parameters, tokens)
        return cls(run=run, fit=fit, held_out=held_out, parameters=parameters, tokens=tokens, loss=loss)

    @property
    def extrapolation(self) -> float:
        """The target's compute divided by the compute of the ladder's largest run."""
        return self.parameters * self.tokens / self.fit.compute

    def lines(self) -> list[str]:
        """Return lines with the law, the check on the held-out size, the target and the forecast."""
        fit, law, sizes = self.fit, self.fit.law, len({point.parameters for point in self.fit.points})
        return [
            f"law          L = {law.floor:.4g} + {law.size_factor:.4g} / N^{law.alpha:.3g} + {law.token_factor:.4g} / "
            f"D^{law.beta:.3g}, with N weights in matrix products; noise of a run: {100 * fit.noise:.2g}%",
            f"check        {self.held_out.text()}",
            f"target       N {self.parameters:,}, D {self.tokens:,}: {describe_extrapolation(self.extrapolation)}; "
            f"{len(fit.points)} runs of {sizes} sizes",
            f"forecast     loss {self.loss.text(4)}, with the 90% interval for a single run",
        ]

    def record(self) -> dict[str, Any]:
        """Return the target, the law, the points and the held-out check as a JSON object."""
        held_out = self.held_out
        return {
            "target": {
                "parameters": self.parameters,
                "tokens": self.tokens,
                "loss": self.loss.value,
                "low": self.loss.low,
                "high": self.loss.high,
                "extrapolation": self.extrapolation,
            },
            "law": attrs.asdict(self.fit.law),
            "noise": self.fit.noise,
            "points": [attrs.asdict(point) for point in self.fit.points],
            "held_out": {
                "points": [
                    attrs.asdict(point) | {"predicted": predicted.value, "low": predicted.low, "high": predicted.high}
                    for point, predicted in zip(held_out.points, held_out.predicted, strict=True)
                ],
                "error": held_out.error,
            },
        }


def target_tokens(run: Run) -> int:
    """Return the number of train tokens of a target run. This number does not depend on the micro-batch.

    The target must have a global batch.
    """
    train = run.train.replace(microbatch_size=1, gradient_accumulation_steps=None)
    fewest_ranks, lengths = train.execution.tensor_parallel, lengths_at_hand(train)
    return make_plan(train, run.model.context_length, fewest_ranks, lengths).train_tokens


def describe_extrapolation(factor: float) -> str:
    """Return a phrase that compares a run's compute with the compute of the ladder's largest run."""
    caution = "" if factor <= MOST_EXTRAPOLATION else f" (intervals were tested up to {MOST_EXTRAPOLATION:g} x)"
    return f"{factor:.3g} x the compute of its ladder's largest run{caution}"


def check_forecast(target: Path) -> None:
    """Raise BadInput if a target's forecast.json is the user's own file instead of an earlier forecast."""
    check_replaceable(target / FORECAST, b'"recipe": ', "a forecast of experiment.py ladder")


def write_forecast(target: Path, forecast: Forecast | None) -> None:
    """Write the target's forecast.json, which train.py --plan shows. Without a forecast, remove the file."""
    check_forecast(target)
    text = None
    if forecast is not None:
        origin = {"date": utc_now()[:10], "commit": git_commit(), "recipe": forecast_recipe(forecast.run)}
        text = json.dumps(origin | forecast.record(), indent=2)
    write_or_remove(target / FORECAST, text)


@attrs.frozen
class BudgetChoice:
    """The best size for a budget on one machine."""

    machine: Machine
    model: ModelConfig
    tokens: int
    # The roofline. If the target's speed was measured, the roofline is multiplied by the ratio of the measured speed to
    # the target's own roofline.
    tokens_per_second: float
    source: str  # explains how tokens_per_second was calculated
    loss: Interval

    @property
    def hours(self) -> float:
        """The duration of the run, including the start-up but not the validation."""
        return (self.tokens / self.tokens_per_second + ASSUMED_START_UP_SECONDS) / 3600


def size_family(models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """Return shapes with the proportions of the largest network in `models`.

    The widest shape is at most BEYOND times as wide as the widest network in `models`. The number of layers is a power
    of the width C, fitted to `models`.
    """
    largest = max(models, key=matmul_parameter_count)
    head, widths = largest.head_width, [model.emb_dim for model in models]
    if len(set(widths)) > 1:
        power, factor = np.polyfit(np.log(widths), np.log([model.n_layers for model in models]), 1)
    else:
        power, factor = 0.0, math.log(largest.n_layers)
    group = largest.n_heads // largest.kv_heads
    step = max(1, min(widths) // (4 * head)) * group  # difference between neighboring shapes, in heads
    family = []
    for heads in range(-(-min(widths) // head // step) * step, BEYOND * max(widths) // head + 1, step):
        width = heads * head
        mlp = None if largest.mlp_width is None else round(largest.mlp_width * width / largest.emb_dim)
        kv_heads = None if largest.n_kv_heads is None else heads // group
        layers = max(1, round(math.exp(factor + power * math.log(width))))
        shape = attrs.evolve(largest, emb_dim=width, n_heads=heads, n_kv_heads=kv_heads, mlp_width=mlp, n_layers=layers)
        family.append(shape)
    return family


def best_sizes(
    fit: LawFit, shapes: Sequence[ModelConfig], target: Run, usd: float, prices: PriceList
) -> list[BudgetChoice]:
    """Return the best shape for each machine, in ascending order of loss.

    The budget pays for the start-up and for training, but not for validation.
    """
    choices = [_best_on(machine, fit, shapes, target, usd) for machine in prices.machines]
    return sorted((choice for choice in choices if choice is not None), key=lambda choice: choice.loss.value)


def describe_best_sizes(
    fit: LawFit, shapes: Sequence[ModelConfig], target: Run, usd: float, prices: PriceList
) -> list[str]:
    """Return lines with the best sizes for a budget. Each of the best machines has a line, followed by its warnings."""
    choices = best_sizes(fit, shapes, target, usd, prices)
    if not choices:
        return [f"{dollars(usd)}: not enough for the start-up of any machine in {prices.path}; raise the budget"]
    lines = []
    for index, choice in enumerate(choices[:BEST_SHOWN]):
        model = choice.model
        lines.append(
            f"{dollars(usd) if index == 0 else 'or':<12} {model.n_layers} layers x {model.emb_dim}, N "
            f"{matmul_parameter_count(model):,}, on {choice.tokens:,} tokens: loss {choice.loss.text(4)}; "
            f"{choice.machine.name}, {choice.hours:.2f} hours at {choice.tokens_per_second:,.0f} tokens/s "
            f"({choice.source})"
        )
        lines += [f"             {limit}" for limit in limits_of(choice, fit, shapes, target)]
    return [*lines, ESTIMATE_CAUTION]


def limits_of(choice: BudgetChoice, fit: LawFit, shapes: Sequence[ModelConfig], target: Run) -> list[str]:
    """Return warnings about a choice of size.

    The choice may be at the edge of the available shapes or tokens, or outside the range of the ladder's runs.
    """
    size, tokens, limits = matmul_parameter_count(choice.model), choice.tokens, []
    sizes = [matmul_parameter_count(shape) for shape in shapes]
    for edge, word in ((min(sizes), "smaller"), (max(sizes), "larger")):
        if size == edge:
            limits.append(f"at the edge of the sizes that were tried; a {word} size may be better")
    extrapolation = size * tokens / fit.compute
    if extrapolation > MOST_EXTRAPOLATION:
        limits.append(f"{describe_extrapolation(extrapolation)}; extend the ladder")
    ratios = [point.tokens / point.parameters for point in fit.points]
    if not min(ratios) <= tokens / size <= max(ratios):
        tested = f"but the ladder has {min(ratios):.3g} to {max(ratios):.3g}"
        limits.append(f"{tokens / size:.3g} tokens per parameter, {tested}; add a horizon")
    available_tokens = _available_tokens(target)
    if available_tokens is None:
        limits.append(f"needs {tokens:,} train tokens; the dataset is not here, so its number of tokens is unknown")
    elif tokens == available_tokens:
        limits.append("uses all available tokens in max_epochs epochs; prepare more tokens, or raise max_epochs")
    return limits


def _best_on(
    machine: Machine, fit: LawFit, shapes: Sequence[ModelConfig], target: Run, usd: float
) -> BudgetChoice | None:
    seconds = paid_seconds(usd, machine.usd_per_hour) - ASSUMED_START_UP_SECONDS
    if seconds <= 0 or machine.gpus % target.train.execution.tensor_parallel:
        return None
    share, source, most_tokens = float(machine.gpus), ESTIMATE, _available_tokens(target) or math.inf
    speed = next((speed for speed in throughputs(target.model, machine, train=target.train) if speed.measured), None)
    if speed is not None:
        share = speed.tokens_per_second / roofline(target.model, machine.gpu, target.train)
        source = f"roofline x {share / machine.gpus:.2f}, measured by {speed.trainer or 'you'}"
    choices = []
    for model in (shape for shape in shapes if target.train.execution.shards in shard_counts(shape)):
        rate = share * roofline(model, machine.gpu, target.train)
        tokens = int(min(seconds * rate, most_tokens))
        loss = fit.predict(matmul_parameter_count(model), tokens)
        choices.append(BudgetChoice(machine, model, tokens, tokens_per_second=rate, source=source, loss=loss))
    for choice in sorted(choices, key=lambda choice: choice.loss.value):
        memory = MemoryModel.of(choice.model, target.train, machine.gpus)
        if memory.largest_microbatch(gpu_bytes(machine.gpu)) is not None:
            return choice
    return None


def _available_tokens(target: Run) -> int | None:
    """Return `max_epochs` times the number of train tokens, or None if a dataset is not on this machine."""
    lengths = [*lengths_at_hand(target.train).values()]
    return None if None in lengths else target.train.data.max_epochs * sum(length or 0 for length in lengths)
