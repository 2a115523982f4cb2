"""Plan of a ladder, and tuning of the rate, with losses by a formula in the place of training."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from experiments.ladder import trunk_training
from experiments.ladder.ladder_file import LadderFile, LadderSize, read_ladder
from experiments.ladder.trunk import Trunk, trunks_of
from experiments.ladder.trunk_training import describe_plan
from tests.experiments.conftest import MakeLadder

Tune = Callable[[float], dict[float, float]]


@pytest.fixture(name="tune")
def _tune(make_ladder: MakeLadder, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Return a function that tunes the rate where the loss is least at a given one; infinite: all diverge."""
    ladder = read_ladder(make_ladder())

    def tune(best: float) -> dict[float, float]:
        rates: dict[Path, float] = {}

        def noted(ladder: LadderFile, size: LadderSize, rate: float) -> list[Trunk]:
            trunks = trunks_of(ladder, size, rate)
            rates.update({trunk.directory: trunk.rate for trunk in trunks})
            return trunks

        def loss(horizon: Any) -> float:
            return 3 + abs(math.log(rates[horizon.directory]) - math.log(best))

        monkeypatch.setattr(trunk_training, "train_trunks", lambda *_, **__: None)
        monkeypatch.setattr(trunk_training, "final_loss", loss)
        monkeypatch.setattr(trunk_training, "trunks_of", noted)
        return trunk_training.tune_rate(None, ladder)  # type: ignore[arg-type]

    return tune


def test_rates_are_added_beyond_an_edge_in_rising_order_and_only_there(tune: Tune) -> None:
    assert list(tune(0.011)) == [0.005, 0.01, 0.02]
    assert list(tune(0.0024)) == [0.00125, 0.0025, 0.005, 0.01, 0.02]


@pytest.mark.parametrize(
    ("best", "problem"),
    [
        (99.0, r"best one of 1x8, 0.16, is the highest.*widen the sweep"),
        (math.inf, r"all rates diverged \(.*0\.005, 0\.01, 0\.02\); lower them"),
    ],
)
def test_without_a_best_rate_inside_no_larger_size_is_trained(tune: Tune, best: float, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        tune(best)


def test_a_rate_is_the_best_by_its_mean_over_the_seeds(make_ladder: MakeLadder, monkeypatch: Any) -> None:
    ladder = read_ladder(make_ladder(seeds=[7, 9]))
    losses = {"0.005": (3.0, 3.4), "0.01": (3.1, 3.1), "0.02": (2.9, 3.5)}

    def loss(horizon: Any) -> float:
        _, rate, seed = re.split("-rate-|-seed-", horizon.directory.name)
        assert horizon.sections["train"]["random_seed"] == int(seed)
        return losses[rate][["7", "9"].index(seed)]

    monkeypatch.setattr(trunk_training, "train_trunks", lambda *_, **__: None)
    monkeypatch.setattr(trunk_training, "final_loss", loss)
    tuned = trunk_training.tune_rate(None, ladder)  # type: ignore[arg-type]
    assert tuned == pytest.approx({0.005: 3.2, 0.01: 3.1, 0.02: 3.2})


def test_time_and_cost_are_those_of_runs_that_have_ended(make_ladder: MakeLadder) -> None:
    ladder = read_ladder(make_ladder())
    assert describe_plan(ladder, 2.0)[-1].startswith(
        "time and cost: not known before a run of this experiment has ended"
    )
    [trunk] = trunks_of(ladder, ladder.sizes[0], 0.01)
    trunk.directory.mkdir(parents=True)
    (trunk.directory / "model.json").write_text(json.dumps(trunk.horizons[-1].sections["model"]))
    (trunk.directory / "train.json").write_text(json.dumps(trunk.horizons[-1].sections["train"]))
    lines = [
        {"event": "end", "step": 9, "sources": [{"tokens": 7200}]},
        {"ledger": {"compile": 0}, "run_ledger": {"compile": 0}, "elapsed_seconds": 3600.0},
    ]
    (trunk.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    line = describe_plan(ladder, 2.0)[-1]
    hours, dollars = line.split(" hours, $")
    assert float(dollars.split()[0].replace(",", "")) == pytest.approx(2 * float(hours), rel=0.01)
    assert line.endswith("one run after the other, at the FLOP/s of 1 earlier run")
