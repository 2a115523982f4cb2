"""Forecast of a target run by a ladder's law: loss with interval, tokens, hours, dollars; forecast.json's content."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
from tabulate import tabulate

from common.errors import printable
from common.files import check_replaceable, replace_file, writing
from evaluation.shared.significance import Interval
from experiments.ladder.loss_law import HeldOut, LawFit
from model.counts import matmul_parameter_count
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.data.locate_tokens import lengths_at_hand
from training.hardware.environment import git_commit
from training.planning.estimate import NoPlan, RunEstimate, make_estimate
from training.planning.forecast_file import FORECAST, recipe_of
from training.planning.price_list import MACHINES, read_machines

MOST_EXTRAPOLATION = 30.0  # of compute: as far as the coverage of intervals is simulated


@attrs.frozen(kw_only=True)
class Forecast:
    """A target run: the law's forecast of its loss, the price list's of its cost."""

    run: Run
    fit: LawFit
    held_out: HeldOut
    tokens: int
    loss: Interval
    estimate: RunEstimate | str  # or why there is none

    @property
    def parameters(self) -> int:
        """N of the law."""
        return matmul_parameter_count(self.run.model)

    @property
    def extrapolation(self) -> float:
        """Compute of the target over that of the ladder's largest run."""
        return self.parameters * self.tokens / self.fit.compute


def target_tokens(run: Run) -> int:
    """Return the train tokens of a target with a global batch, which its micro-batches do not change."""
    train = run.train.replace(microbatch_size=1, gradient_accumulation_steps=None)
    return make_plan(train, run.model.context_length, 1, lengths_at_hand(train, None)).train_tokens


def price_target(target: Run) -> RunEstimate | str:
    """Return the target's hours and dollars on the machines of the price list, or why no batch of it fits their GPUs.

    Raises BadInput where it is too big for every machine.
    """
    try:
        return make_estimate(target, read_machines(MACHINES, ()), lengths_at_hand(target.train, None))
    except NoPlan as problem:  # such as a laptop's batch
        return f"not priced: {problem}"


def make_forecast(run: Run, fit: LawFit, held_out: HeldOut, estimate: RunEstimate | str) -> Forecast:
    """Forecast a target; `estimate`: training.planning.estimate.make_estimate of it, or why there is none."""
    tokens = target_tokens(run)
    loss = fit.predict(matmul_parameter_count(run.model), tokens)
    return Forecast(run=run, fit=fit, held_out=held_out, tokens=tokens, loss=loss, estimate=estimate)


def describe_forecast(forecast: Forecast) -> list[str]:
    """Return the forecast as lines."""
    fit, held_out, law = forecast.fit, forecast.held_out, forecast.fit.law
    sizes = len({point.parameters for point in fit.points})
    return [
        f"law          L = {law.floor:.4g} + {law.size_factor:.4g} / N^{law.alpha:.3g} + {law.token_factor:.4g} / "
        f"D^{law.beta:.3g}, N weights in matrix products; noise of a run {100 * fit.noise:.2g} %",
        f"check        {held_out.text()}",
        f"target       N {forecast.parameters:,}, D {forecast.tokens:,}: "
        f"{describe_extrapolation(forecast.extrapolation)}; {len(fit.points)} runs of {sizes} sizes",
        f"forecast     loss {forecast.loss.text(4)}, 90 % interval of one run",
        "",
        *([forecast.estimate] if isinstance(forecast.estimate, str) else _price_table(forecast.estimate)),
    ]


def _price_table(estimate: RunEstimate) -> list[str]:
    rows = []
    for offer in estimate.offers:
        if offer.plan is not None:
            speed = offer.throughputs[0]
            cost = [f"{speed.tokens_per_second:,.0f}", f"{offer.hours():.2f}", f"{offer.usd():,.2f}", speed.source]
            rows.append([printable(offer.machine.name), f"{offer.plan.train_tokens:,}", *cost])
    columns = ["machine", "tokens", "tokens/s", "hours", "$", "source of tokens/s"]
    return tabulate(rows, columns, disable_numparse=True, colalign=("left", *["right"] * 4, "left")).splitlines()


def describe_extrapolation(factor: float) -> str:
    """Return a run's distance beyond the ladder."""
    beyond = "" if factor <= MOST_EXTRAPOLATION else f" (beyond {MOST_EXTRAPOLATION:g} x no interval was tested)"
    return f"{factor:.3g} x the compute{beyond} of its ladder's largest run"


def forecast_record(forecast: Forecast, commit: str | None) -> dict[str, Any]:
    """Return the content of forecast.json, to be written beside the target's train.json."""
    held_out = forecast.held_out
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit,
        "target": {
            "parameters": forecast.parameters,
            "tokens": forecast.tokens,
            "loss": forecast.loss.value,
            "low": forecast.loss.low,
            "high": forecast.loss.high,
            "extrapolation": forecast.extrapolation,
        },
        "law": attrs.asdict(forecast.fit.law),
        "noise": forecast.fit.noise,
        "points": [attrs.asdict(point) for point in forecast.fit.points],
        "held_out": {
            "points": [
                attrs.asdict(point) | {"predicted": predicted.value, "low": predicted.low, "high": predicted.high}
                for point, predicted in zip(held_out.points, held_out.predicted, strict=True)
            ],
            "error": held_out.error,
        },
        "recipe": recipe_of(forecast.run),
    }


def check_forecast(target: Path) -> None:
    """Raise BadInput where a target's forecast.json is a file of the user: no forecast of an earlier call."""
    check_replaceable(target / FORECAST, b'"recipe": ', "a forecast of experiment.py ladder", "target, or move it away")


def write_forecast(target: Path, forecast: Forecast | None) -> Path:
    """Write the target's forecast.json, which train.py --plan shows; without a forecast, remove it. Return its path."""
    path = target / FORECAST
    check_forecast(target)
    with writing(path):
        if forecast is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, json.dumps(forecast_record(forecast, git_commit()), indent=2) + "\n", durable=True)
    return path
