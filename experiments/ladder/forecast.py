"""Forecast of a target run's loss by a ladder's law, with its interval; forecast.json's content."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs

from common.files import check_replaceable, replace_file, writing
from evaluation.shared.significance import Interval
from experiments.ladder.loss_law import HeldOut, LawFit
from model.counts import matmul_parameter_count
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.data.locate_tokens import lengths_at_hand
from training.hardware.environment import git_commit
from training.planning.estimate_table import FORECAST, recipe_of

MOST_EXTRAPOLATION = 30.0  # of compute: as far as the coverage of intervals is simulated


@attrs.frozen(kw_only=True)
class Forecast:
    """A target run's forecast by a law."""

    run: Run
    fit: LawFit
    held_out: HeldOut
    parameters: int  # N of the law
    tokens: int
    loss: Interval

    @classmethod
    def of(cls, run: Run, fit: LawFit, held_out: HeldOut) -> "Forecast":
        parameters, tokens = matmul_parameter_count(run.model), target_tokens(run)
        loss = fit.predict(parameters, tokens)
        return cls(run=run, fit=fit, held_out=held_out, parameters=parameters, tokens=tokens, loss=loss)

    @property
    def extrapolation(self) -> float:
        """Compute of the target over that of the ladder's largest run."""
        return self.parameters * self.tokens / self.fit.compute

    def lines(self) -> list[str]:
        """Return the law, its check and the forecast as lines."""
        fit, law, sizes = self.fit, self.fit.law, len({point.parameters for point in self.fit.points})
        return [
            f"law          L = {law.floor:.4g} + {law.size_factor:.4g} / N^{law.alpha:.3g} + {law.token_factor:.4g} / "
            f"D^{law.beta:.3g}, N weights in matrix products; noise of a run {100 * fit.noise:.2g} %",
            f"check        {self.held_out.text()}",
            f"target       N {self.parameters:,}, D {self.tokens:,}: {describe_extrapolation(self.extrapolation)}; "
            f"{len(fit.points)} runs of {sizes} sizes",
            f"forecast     loss {self.loss.text(4)}, 90 % interval of one run",
        ]


def target_tokens(run: Run) -> int:
    """Return the train tokens of a target with a global batch, which its micro-batches do not change."""
    train = run.train.replace(microbatch_size=1, gradient_accumulation_steps=None)
    return make_plan(train, run.model.context_length, 1, lengths_at_hand(train, None)).train_tokens


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


def write_forecast(target: Path, forecast: Forecast | None) -> None:
    """Write the target's forecast.json, which train.py --plan shows; without a forecast, remove it."""
    path = target / FORECAST
    check_forecast(target)
    with writing(path):
        if forecast is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, json.dumps(forecast_record(forecast, git_commit()), indent=2) + "\n", durable=True)
