"""Table of a sweep: what stands beside the verdicts."""

from experiments.sweep.sweep_file import read_sweep
from experiments.sweep.sweep_table import SweepTable, describe_power
from experiments.sweep.verdicts import VariantResult
from tests.experiments.conftest import MakeSweep


def test_a_mean_over_some_of_the_seeds_says_of_how_many(make_sweep: MakeSweep) -> None:
    sweep = read_sweep(make_sweep(seeds=3))
    base = VariantResult(name="base", losses={42: 4.0, 43: 4.1, 44: 4.2})
    text = SweepTable.of(sweep, [base, VariantResult(name="wild", losses={42: 3.0, 43: None, 44: 3.2})]).text()
    assert "4.1000 " in text and "3.1000 (of 2)" in text and "diverged in 1 of 3 seeds" in text


def test_missing_runs_are_named(make_sweep: MakeSweep) -> None:
    sweep = read_sweep(make_sweep())
    lever = sweep.variants[1].name
    results = [VariantResult(name="base", losses={42: 4.0}), VariantResult(name=lever, losses={43: 4.0})]
    assert f"Missing: base-seed-43, {lever}-seed-42." in SweepTable.of(sweep, results).text()


def test_one_comparison_is_one(make_sweep: MakeSweep) -> None:
    results = [VariantResult(name=name, losses={42: 4.0, 43: 4.1}) for name in ("base", "same")]
    sweep = read_sweep(make_sweep())
    text = SweepTable.of(sweep, results).text()
    assert "intervals for 1 comparison." in text and "without what a seed does to all variants alike: 0.0000" in text
    assert "without what a seed does to all variants alike" in describe_power(sweep)
