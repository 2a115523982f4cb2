"""Conclusion of a ladder: its points, the held-out check, and where that holds the law and the forecast."""

import json
from collections.abc import Sequence
from pathlib import Path

from common.errors import BadInput
from common.files import check_replaceable, replace_file, writing
from experiments.ladder.budget_sizes import best_sizes, describe_choices, size_family
from experiments.ladder.forecast import Forecast, forecast_record, make_forecast
from experiments.ladder.ladder_file import LadderFile
from experiments.ladder.ladder_table import LadderTable
from experiments.ladder.loss_law import LawFit, fit_law, hold_out_largest, refusal
from experiments.ladder.trunk import Trunk
from experiments.ladder.trunk_training import loss_points
from training.data.locate_tokens import lengths_at_hand
from training.hardware.environment import git_commit
from training.planning.estimate import NoPlan, RunEstimate, make_estimate
from training.planning.forecast_file import FORECAST
from training.planning.price_list import MACHINES, PriceList, read_machines


def conclude(ladder: LadderFile, rates: dict[float, float], trunks: Sequence[Trunk], usd: float | None) -> LadderTable:
    """Return the results; `usd`: with the best sizes for so much money. Raises NoForecast for a run that diverged."""
    points = loss_points(trunks)
    held_out = hold_out_largest(points)
    refused = refusal(held_out)
    forecast, budget = None, [] if usd is None else ["", f"for ${usd:,.2f}   no best size without a forecast"]
    if refused is None:
        fit = fit_law(points)
        forecast = make_forecast(ladder.target, fit, held_out, price_target(ladder))
        if usd is not None:
            budget = ["", *_best_for(usd, ladder, fit, read_machines(MACHINES, ()))]
    return LadderTable(
        ladder=ladder,
        rates=rates,
        trunks=trunks,
        points=points,
        held_out=held_out,
        forecast=forecast,
        refused=refused,
        budget=budget,
    )


def price_target(ladder: LadderFile) -> RunEstimate | str:
    """Return the target's hours and dollars on the machines of the price list, or why no batch of it fits their GPUs.

    Raises BadInput where it is too big for every machine.
    """
    try:
        return make_estimate(ladder.target, read_machines(MACHINES, ()), lengths_at_hand(ladder.target.train, None))
    except NoPlan as problem:  # such as a laptop's batch
        return f"not priced: {problem}"


def _best_for(usd: float, ladder: LadderFile, fit: LawFit, prices: PriceList) -> list[str]:
    family = size_family([size.model for size in ladder.sizes])
    try:
        return describe_choices(usd, best_sizes(fit, family, ladder.target, usd, prices))
    except BadInput as error:  # too little money for any: the ladder is paid for, and its table stays
        return [f"for ${usd:,.2f}   {error}"]


def check_forecast(target: Path) -> None:
    """Raise BadInput where a target's forecast.json is a file of the user: no forecast of an earlier call."""
    check_replaceable(target / FORECAST, b'"recipe": ', "a forecast of experiment.py ladder", "target, or move it away")


def write_forecast(ladder: LadderFile, forecast: Forecast | None) -> Path:
    """Write the target's forecast.json, which train.py --plan shows; without a forecast, remove it. Return its path."""
    path = ladder.target.directory / FORECAST
    check_forecast(ladder.target.directory)
    with writing(path):
        if forecast is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, json.dumps(forecast_record(forecast, git_commit()), indent=2) + "\n", durable=True)
    return path
