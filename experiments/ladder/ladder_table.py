"""The results of a ladder, which are printed and written as Markdown and JSON.

They contain no dates or durations, so that a ladder that was killed and continued gives the same bytes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from tabulate import tabulate

from common.errors import BadInput
from common.output import show, warning
from common.text import dollars
from experiments.ladder.forecast import Forecast, describe_best_sizes, size_family, write_forecast
from experiments.ladder.ladder_file import MOST_DEVIATION, LadderFile, rounded_rate, scaled_rate, size_name
from experiments.ladder.loss_law import fit_law, hold_out_largest, mean_points, refusal
from experiments.ladder.trunk import (
    SCHEDULE,
    Trunk,
    best_rate,
    loss_points,
    size_trunks,
    train_trunks,
    trunks_of,
    tune_rate,
)
from experiments.shared.experiment_files import show_results
from experiments.shared.run_comparison import (
    check_same_measure,
    check_same_tokens,
    describe_conditions,
    read_recorded,
)
from experiments.shared.run_pool import RunPool
from model.counts import matmul_parameter_count
from training.planning.forecast_file import FORECAST
from training.planning.price_list import MACHINES, read_machines
from training.telemetry.metrics_log import LADDER


@attrs.frozen(kw_only=True)
class LadderTable:
    """The results of a ladder."""

    ladder: LadderFile
    rates: dict[float, float]  # loss of the smallest size, by learning rate
    trunks: Sequence[Trunk]
    forecast: Forecast
    refused: str | None  # the reason why there is no forecast; None if there is one
    budget: Sequence[str] = ()  # lines about the best sizes for a budget
    warnings: Sequence[str] = ()  # about differences between the runs' records

    def text(self, form: str = "simple") -> str:
        """Return all results as text. `form` is a table format of tabulate."""
        law = self.forecast.lines()
        if self.refused is not None:
            check = f"check        {self.forecast.held_out.text()}"
            law = [check, f"no forecast  {self.refused}"]
        fence = ["```"] if form == "github" else []
        lines = [*fence, *law, *self.budget, *fence]
        return "\n".join([self._rate_table(form), "", self._point_table(form), "", *lines, "", *self.notes()])

    def show(self) -> None:
        """Print and write the results. Write the target's forecast; if there is none, remove an earlier forecast."""
        target = self.ladder.target.directory
        show_results(self.text, self.record, self.ladder.output, LADDER, str(target))
        write_forecast(target, None if self.refused else self.forecast)

    def notes(self) -> list[str]:
        """Return the scaling rules and the settings that they give for the target, as lines.

        A line warns if the target's train.json has a different learning rate or schedule.
        """
        target, size = self.ladder.target.train, matmul_parameter_count(self.ladder.target.model)
        rate = scaled_rate(best_rate(self.rates), size, matmul_parameter_count(self.trunks[0].size))
        target_rate, seeds = target.optimization.learning_rate, self.ladder.seeds
        subject, where = "ladder" if self.refused else "forecast", warning(f"{target.file}:")
        lines = [
            "Rules (OLMo-core): the rate falls as N^(-1/3) from the smallest size's best rate, and the batch grows as "
            "N^(2/3) up to the target's batch.",
            *([f"Losses are means over the seeds {', '.join(map(str, seeds))}."] if len(seeds) > 1 else []),
            f"For the target: learning_rate {rate:g}, batch {self.ladder.batch} sequences, {SCHEDULE}.",
        ]
        if not 1 / MOST_DEVIATION <= target_rate / rate <= MOST_DEVIATION:
            found_rate = rounded_rate(target_rate)
            lines.append(f"{where} learning_rate is {found_rate:g}, but the {subject} assumes {rate:g}, from the rule")
        if target.optimization.decay != SCHEDULE:
            schedule = target.optimization.decay or "constant"
            lines.append(f'{where} schedule_learning_rate is "{schedule}", but the {subject} assumes "{SCHEDULE}"')
        return [*lines, *self.warnings]

    def _rate_table(self, form: str) -> str:
        best = best_rate(self.rates)
        rows = [
            [f"{rate:g}", f"{loss:.4f}" if math.isfinite(loss) else "diverged", "best" if rate == best else ""]
            for rate, loss in self.rates.items()
        ]
        columns = (f"learning rate of {size_name(self.trunks[0].size)}", "validation loss", "")
        return tabulate(rows, columns, form, disable_numparse=True, colalign=("right", "right", "left"))

    def _point_table(self, form: str) -> str:
        rows, points = [], iter(mean_points(self.forecast.fit.points))
        for trunk in self.trunks[:: len(self.ladder.seeds)]:
            batch = trunk.horizons[-1].plan.layout.global_batch_size
            for ratio in self.ladder.tokens_per_parameter:
                point = next(points)
                setting = [f"{trunk.rate:g}", f"{batch}", f"{ratio:g}", f"{point.tokens:,}"]
                rows.append([point.rung, f"{point.parameters:,}", *setting, f"{point.loss:.4f}"])
        columns = ("layers x width", "N", "rate", "batch", "tokens/N", "tokens D", "validation loss")
        return tabulate(rows, columns, form, disable_numparse=True, colalign=("left", *["right"] * 6))

    def record(self) -> dict[str, Any]:
        """Return the rates, the sizes and the forecast. Without a forecast, "target", "law" and "noise" are None."""
        return {
            "run": str(self.ladder.target.directory),
            "rates": [
                {"learning_rate": rate, "loss": loss if math.isfinite(loss) else None}
                for rate, loss in self.rates.items()
            ],
            "sizes": [
                {"name": size_name(trunk.size), "seed": trunk.seed, "learning_rate": trunk.rate, **trunk.batch}
                for trunk in self.trunks
            ],
            **self.forecast.record(),
            **(dict.fromkeys(("target", "law", "noise")) if self.refused else {}),
            "refused": None if self.refused is None else f"no forecast: {self.refused}",
            "notes": self.notes(),
        }


def train_ladder(pool: RunPool, ladder: LadderFile, usd: float | None) -> Callable[[], None]:
    """Train all trunks and branches, and return a function that shows the results.

    Raise errors as `RunPool.train` does, and NoForecast if the best learning rate is at the edge of the tested rates.
    """
    rates = tune_rate(pool, ladder)
    check_records(tuning_runs(ladder, rates))  # before the larger sizes cost money
    trunks = size_trunks(ladder, best_rate(rates))
    train_trunks(pool, trunks, branches=True)
    return partial(show_ladder, ladder, rates, trunks, usd)


def show_ladder(ladder: LadderFile, rates: dict[float, float], trunks: Sequence[Trunk], usd: float | None) -> None:
    """Show the results of a trained ladder and write the target's forecast. Raise BadInput if there is no forecast."""
    horizons = [horizon.directory for trunk in trunks for horizon in trunk.horizons]
    warnings = check_records([*tuning_runs(ladder, rates), *horizons])
    target, table = ladder.target.directory, attrs.evolve(conclude(ladder, rates, trunks, usd), warnings=warnings)
    table.show()
    if table.refused is not None:
        raise BadInput(f"{ladder.file}: no forecast: {table.refused}; all results are in {ladder.output}")
    show(f"{target / FORECAST}: train.py {target} --plan shows this forecast")


def tuning_runs(ladder: LadderFile, rates: Iterable[float]) -> list[Path]:
    """Return the runs of the smallest size that were used to choose its learning rate."""
    trunks = [trunk for rate in rates for trunk in trunks_of(ladder, ladder.sizes[0], rate)]
    return [trunk.directory for trunk in trunks]


def check_records(runs: Iterable[Path]) -> list[str]:
    """Return warnings about conditions that differ between the runs, according to their own records.

    Raise BadInput if their losses were not measured on the same tokens. Such losses cannot be used to fit a law or to
    choose a learning rate.
    """
    recorded, warnings = read_recorded(dict.fromkeys(runs))
    check_same_tokens(recorded)
    check_same_measure(recorded)
    return [*warnings, *describe_conditions(recorded)]


def conclude(ladder: LadderFile, rates: dict[float, float], trunks: Sequence[Trunk], usd: float | None) -> LadderTable:
    """Return the results of a ladder. If `usd` is given, they include the best sizes for this amount of money.

    Raise NoForecast if a run diverged.
    """
    points = loss_points(trunks)
    forecast = Forecast.of(ladder.target, fit_law(points), hold_out_largest(points))
    refused = refusal(forecast.held_out, forecast.fit)
    budget: list[str] = []
    if usd is not None:
        budget = ["", f"for {dollars(usd)}   without a forecast, there is no best size"]
        if refused is None:
            family, prices = size_family(ladder.sizes), read_machines(MACHINES, ())
            budget[1:] = describe_best_sizes(forecast.fit, family, ladder.target, usd, prices)
    return LadderTable(ladder=ladder, rates=rates, trunks=trunks, forecast=forecast, refused=refused, budget=budget)
