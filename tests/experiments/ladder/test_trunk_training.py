"""The plan of a ladder, and the choice of its learning rate, with losses from a formula instead of training."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from experiments.ladder import trunk
from experiments.ladder.ladder_file import read_ladder
from experiments.ladder.trunk import describe_plan, trunks_of
from experiments.shared.experiment_files import write_run_directory
from tests.experiments.conftest import MakeLadder

Tune = Callable[..., dict[float, float]]


@pytest.fixture(name="tune")
def _tune(make_ladder: MakeLadder, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Return a function that chooses the learning rate. Its argument `loss` computes the loss for a rate and a seed."""
    ladder = read_ladder(make_ladder())

    def tune(loss: Callable[[float, int], float], seeds: tuple[int, ...] = (42,)) -> dict[float, float]:
        def final_loss(horizon: Any) -> float:
            _, rate, *named = re.split("-rate-|-seed-", horizon.directory.name)
            seed = horizon.sections["train"].get("random_seed", 42)
            assert named in ([], [f"{seed}"])
            return loss(float(rate), seed)

        monkeypatch.setattr(trunk, "train_trunks", lambda *_, **__: None)
        monkeypatch.setattr(trunk, "final_loss", final_loss)
        return trunk.tune_rate(None, attrs.evolve(ladder, seeds=seeds))  # type: ignore[arg-type]

    return tune


def minimum_at(best: float) -> Callable[[float, int], float]:
    """Return a loss function with its minimum at `best`. If `best` is infinite, all losses are infinite."""
    return lambda rate, _: 3 + abs(math.log(rate) - math.log(best))


def test_rates_are_added_only_beyond_an_edge(tune: Tune) -> None:
    assert list(tune(minimum_at(0.011))) == [0.005, 0.01, 0.02]
    assert list(tune(minimum_at(0.0024))) == [0.00125, 0.0025, 0.005, 0.01, 0.02]


@pytest.mark.parametrize(
    ("best", "problem"),
    [
        (99.0, r"best rate for 1x8, 0.16, is the highest rate.*add rates at the high end"),
        (math.inf, r"diverged at all rates \(.*0\.005, 0\.01, 0\.02\); use lower rates"),
    ],
)
def test_a_best_rate_at_the_edge_ends_the_ladder(tune: Tune, best: float, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        tune(minimum_at(best))


def test_the_best_rate_has_the_lowest_mean_loss(tune: Tune) -> None:
    losses = {0.005: {7: 3.0, 9: 3.4}, 0.01: {7: 3.1, 9: 3.1}, 0.02: {7: 2.9, 9: 3.5}}
    tuned = tune(lambda rate, seed: losses[rate][seed], seeds=(7, 9))
    assert tuned == pytest.approx({0.005: 3.2, 0.01: 3.1, 0.02: 3.2})


def test_costs_are_estimated_from_finished_runs(make_ladder: MakeLadder) -> None:
    ladder = read_ladder(make_ladder())
    unknown = "time and cost: unknown until a run of this experiment has ended"
    assert describe_plan(ladder, 2.0)[-1].startswith(unknown)
    [trunk] = trunks_of(ladder, ladder.sizes[0], 0.01)
    write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    lines = [
        {"event": "end", "step": 9, "sources": [{"tokens": 7200}]},
        {"ledger": {"compile": 0}, "run_ledger": {"compile": 0}, "elapsed_seconds": 3600.0},
    ]
    (trunk.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    line = describe_plan(ladder, 2.0)[-1]
    hours, dollars = line.split(" hours, $")
    assert float(dollars.split()[0].replace(",", "")) == pytest.approx(2 * float(hours), rel=0.01)
    assert line.endswith("if one run is trained at a time, at the FLOP/s of 1 earlier run")
