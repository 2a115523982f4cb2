"""Read the forecast of a run's final loss: forecast.json in the run directory, written by `experiment.py ladder`."""

import json
from typing import Any

import attrs

from common.checks import ValueCheck, integer, number, structured, text
from common.errors import refusing
from common.json_files import read_json
from common.text import quoted
from model.config import ModelConfig
from training.config.train_config import Run, TrainConfig, recipe

FORECAST = "forecast.json"
WINDOWS = ("validation_sequences", "start_val_token")  # keys that determine on which tokens the loss is measured
_RUN_AGAIN = "run experiment.py ladder again"


@attrs.frozen(kw_only=True)
class ForecastPoint:
    """A run of the ladder. The scaling law was fitted to these runs."""

    parameters: int = attrs.field(validator=integer(1))
    tokens: int = attrs.field(validator=integer(1))
    loss: float = attrs.field(validator=number(0, above=True))


@attrs.frozen(kw_only=True)
class ForecastTarget:
    """The forecast of the target's loss, with its interval."""

    loss: float = attrs.field(validator=number(0, above=True))
    low: float = attrs.field(validator=number(0))
    high: float = attrs.field(validator=number(0))
    extrapolation: float = attrs.field(validator=number(0, above=True))

    def __attrs_post_init__(self) -> None:
        if not self.low <= self.loss <= self.high:
            raise ValueError(f"low, loss, high: got {self.low}, {self.loss} and {self.high}, wanted rising numbers")


@attrs.frozen(kw_only=True)
class ForecastMiss:
    """The error of a forecast for the ladder's largest size. This size was left out of the fit."""

    error: float = attrs.field(validator=number(0))  # relative error


@attrs.frozen(kw_only=True)
class ForecastRecord:
    """The part of forecast.json that is shown."""

    date: str = attrs.field(validator=text())
    commit: str | None
    recipe: dict[str, dict[str, Any]]
    target: ForecastTarget
    points: list[ForecastPoint] = attrs.field(validator=ValueCheck(bool, "the runs of a ladder"))
    held_out: ForecastMiss


def forecast_recipe(run: Run) -> dict[str, dict[str, Any]]:
    """Return the keys that determine the final loss, in the form in which JSON stores them.

    A forecast is valid only for runs with the same values.
    """
    train = run.train.flat()
    keys = recipe(run.model, run.train)
    keys["train"] |= {key: train[key] for key in WINDOWS}
    stored: dict[str, dict[str, Any]] = json.loads(json.dumps(keys))
    return stored


def describe_forecast_file(run: Run) -> list[str]:
    """Return the lines that describe a run's forecast, if there is one. Raises BadInput if the file is damaged."""
    path = run.directory / FORECAST
    if not path.exists():
        return []
    advice = f"move it away, or {_RUN_AGAIN}"
    kinds = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
    with refusing(f"{path}: not a ladder's forecast", advice, kinds):
        record = structured(read_json(path, advice=advice), ForecastRecord, unknown_keys=True)
        if changed := _changed_key(forecast_recipe(run), record.recipe):
            return [f"forecast     not for this run: {changed}; {_RUN_AGAIN}"]
        target, points, error_percent = record.target, len(record.points), 100 * record.held_out.error
        return [
            f"forecast     loss {target.loss:.4f} [{target.low:.4f}, {target.high:.4f}], 90% interval for a single "
            f"run, at {target.extrapolation:.3g} x the compute of the ladder's largest run",
            f"             ladder of {points} runs, {record.date}, commit {record.commit}: a forecast of the "
            f"largest size from the smaller sizes was off by {error_percent:.1f}% on average",
        ]


def _changed_key(present: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]) -> str | None:
    """Describe the first key whose value has changed since the forecast was made, or return None if none has changed.

    If a key is missing from the record, its default is used.
    """
    model = structured(recorded["model"], ModelConfig, unknown_keys=True)
    before = recipe(model, TrainConfig.from_record({"microbatch_size": 1} | recorded["train"]))
    before["train"] |= {key: recorded["train"].get(key, present["train"][key]) for key in WINDOWS}
    for section, values in present.items():
        for key, value in values.items():
            if value != (old_value := before[section][key]):
                return (
                    f"{section}.json: {key} is {quoted(value)}, but was {quoted(old_value)} when the forecast was made"
                )
    return None
