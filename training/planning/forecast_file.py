"""Forecast of a run's final loss, forecast.json in its directory: written by experiment.py ladder, shown by --plan."""

import json
from typing import Any

import attrs

from common.errors import BadInput, quoted
from common.json_files import read_json
from training.config.train_config import Run, one_form, recipe

FORECAST = "forecast.json"
WINDOWS = ("validation_sequences", "start_val_token")  # on which the loss is measured
_AGAIN = "run experiment.py ladder again"


def recipe_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the keys that determine the final loss, as JSON would give them back: a forecast is valid for these."""
    train = run.train.flat()
    keys = recipe(attrs.asdict(run.model), train)
    keys["train"] |= {key: train[key] for key in WINDOWS}
    stored: dict[str, dict[str, Any]] = json.loads(json.dumps(keys))
    return stored


def describe_forecast_file(run: Run) -> list[str]:
    """Return a run's forecast as lines; none without a file. Raises BadInput for a damaged one."""
    path = run.directory / FORECAST
    if not path.exists():
        return []
    advice = f"move it away, or {_AGAIN}"
    try:
        record = read_json(path, advice=advice)
        if changed := _changed(recipe_of(run), record["recipe"]):
            return [f"forecast     not for this run: {changed}; {_AGAIN}"]
        target, points, missed = record["target"], len(record["points"]), 100 * record["held_out"]["error"]
        return [
            f"forecast     loss {target['loss']:.4f} [{target['low']:.4f}, {target['high']:.4f}], 90 % interval of one "
            f"run, at {target['extrapolation']:.3g} x the compute of its ladder's largest run",
            f"             ladder of {points} runs, {record['date']}, commit {record['commit']}: its largest size, "
            f"held out, was missed by {missed:.1f} % on average",
        ]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: not a ladder's forecast: {error}; {advice}") from None


def _changed(now: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]) -> str | None:
    """Return the first key that differs from the forecast's, with both values.

    A key that the forecast lacks had its default; those of the validation windows are not known then.
    """
    before = recipe(one_form("model", recorded["model"]), one_form("train", {"microbatch_size": 1} | recorded["train"]))
    before["train"] |= {key: recorded["train"].get(key, now["train"][key]) for key in WINDOWS}
    for section, values in now.items():
        for key, value in values.items():
            if value != (was := before[section][key]):
                return f"{section}.json: {key} is {quoted(value)}, and was {quoted(was)} when it was made"
    return None
