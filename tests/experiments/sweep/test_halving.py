"""Successive halving: the rule alone, and runs that were trained before it."""

import pytest

from common.errors import BadInput
from experiments.sweep.halving import check_rungs, losers
from experiments.sweep.sweep_file import Halving, read_sweep
from experiments.sweep.variant_runs import runs_of, write_runs
from tests.experiments.conftest import MakeSweep
from training.checkpoints.directory import CHECKPOINTS, name_of


@pytest.mark.parametrize(("factor", "lost"), [(3, ["c", "d"]), (2, ["c", "d"]), (1.3, []), (100, ["a", "c", "d"])])
def test_the_best_of_a_rung_go_on_rounded_up_and_at_least_one(factor: float, lost: list[str]) -> None:
    means = {"a": 3.1, "b": 3.0, "c": 3.2, "d": float("inf")}
    assert losers(Halving(factor=factor, rungs=(0.5,)), means) == lost


@pytest.mark.parametrize(("rungs", "steps"), [([0.1, 0.15], "1, 1 of 8"), ([0.5, 0.99], "4, 8 of 8")])
def test_rungs_on_one_step_or_on_the_last_are_refused(make_sweep: MakeSweep, rungs: list[float], steps: str) -> None:
    sweep = read_sweep(file := make_sweep(halving={"factor": 2, "rungs": rungs}))
    with pytest.raises(BadInput, match=f"halving: base-seed-42: got rungs at steps {steps}, wanted rising ones before"):
        check_rungs(sweep, runs_of(sweep, file.with_suffix(""), 1))


def test_a_rule_that_comes_after_a_run_has_passed_its_rung_is_refused_before_training(make_sweep: MakeSweep) -> None:
    file = make_sweep(halving={"factor": 2, "rungs": [0.25]})
    sweep = read_sweep(file)
    runs = runs_of(sweep, file.with_suffix(""), 1)
    write_runs(runs)
    check_rungs(sweep, runs)
    (runs[1].directory / CHECKPOINTS / name_of(8)).mkdir(parents=True)
    with pytest.raises(BadInput, match=r"halving: base-seed-43 is already past the rung at step 2, .*remove the key"):
        check_rungs(sweep, runs)
