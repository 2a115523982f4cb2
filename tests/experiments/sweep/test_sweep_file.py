"""Sweep files: their variants, names and seeds. Errors name the file and the key."""

from typing import Any

import pytest

from common.errors import BadInput
from experiments.sweep.sweep_file import Halving, read_sweep
from tests.conftest import MakeRun
from tests.experiments.conftest import MakeSweep


def test_each_value_that_differs_from_the_base_is_a_variant(make_sweep: MakeSweep) -> None:
    levers = {
        "train.learning_rate": [0.01, 0.02, 5e-3],
        "model.qk_norm": [False, True],
        "muon": {"train.optimizer": "muon", "train.matrix_learning_rate": 0.01},
    }
    sweep = read_sweep(make_sweep(levers=levers, set={"train.require_stock_class": False}))
    names = ["base", "learning_rate=0.02", "learning_rate=0.005", "qk_norm=true", "muon"]
    assert [variant.name for variant in sweep.variants] == names
    assert sweep.variants[-1].changes == {"train.optimizer": "muon", "train.matrix_learning_rate": 0.01}
    assert sweep.seeds == (42, 43)


def test_the_micro_batch_can_be_a_lever(make_sweep: MakeSweep, make_run: MakeRun) -> None:
    base = make_run("free", global_batch_size=None)
    sweep = read_sweep(make_sweep(base=base, levers={"train.microbatch_size": [4]}))
    assert [variant.name for variant in sweep.variants] == ["base", "microbatch_size=4"]


def test_seeds_are_a_list_or_a_number(make_sweep: MakeSweep) -> None:
    assert read_sweep(file := make_sweep(seeds=None)).seeds == (42, 43, 44, 45, 46)
    assert read_sweep(make_sweep(base=file.with_name("base"), seeds=[7, 3])).seeds == (7, 3)


@pytest.mark.parametrize(("factor", "losers"), [(3, ["c", "d"]), (2, ["c", "d"]), (1.3, []), (100, ["a", "c", "d"])])
def test_at_least_one_variant_survives_a_rung(factor: float, losers: list[str]) -> None:
    means = {"a": 3.1, "b": 3.0, "c": 3.2, "d": float("inf")}
    assert Halving(factor=factor, rungs=(0.5,)).losers(means) == losers


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"lever": {}}, "unknown key 'lever'; did you mean 'levers'?"),
        ({"mixture": {"sources": ["a", "b"], "runs": 9}}, "mixture: the mixing law was removed: the noise of a seed"),
        ({"levers": None, "mixture": None}, "instead, add 'measure' and one lever for each mixture: "),
        ({"levers": {"train.learning_rat": [1]}}, "unknown key 'train.learning_rat'; did you mean 'train.learning_rat"),
        ({"levers": {"train.random_seed": [1]}}, "the seeds of a sweep are set by its key 'seeds'"),
        ({"levers": {"train.checkpoints": ["s3://bucket/a"]}}, "train.checkpoints: all runs would share this bucket"),
        ({"set": {"train.checkpoints": "s3://bucket/a"}}, "train.checkpoints: all runs would share this bucket"),
        ({"levers": {"model.context_length": [16]}}, "cannot be a lever, because it changes the tokens on which"),
        ({"levers": {"train.learning_rate": 1}}, "train.learning_rate: got 1, expected a list of values"),
        ({"levers": {"train.learning_rate": [0.01]}}, "got 0 variants that differ from the base"),
        ({"levers": {"train.clipping_max_norm": [1]}}, "got 0 variants that differ from the base"),
        (
            {"levers": {"train.final_learning_rate_percent": [10], "model.n_kv_heads": [2], "model.mlp_width": [128]}},
            "got 0 variants that differ from the base",
        ),
        ({"seeds": 1001}, "seeds: got 1001, expected a number from 1 to 1,000, or a list"),
        ({"levers": {"../up": {"train.learning_rate": 1}}}, "the name may only have letters"),
        ({"levers": {"base": {"train.learning_rate": 1.0}}}, "two variants are called 'base'"),
        ({"set": {"train.validation_interval": None}}, "never validates"),
        ({"levers": {"train.learning_rate": [0.02, -1]}}, "learning_rate: got -1"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"seeds": [1, 1]}, "seeds: got [1, 1]"),
        ({"halving": {"factor": 3}}, "halving: got {'factor': 3}, expected"),
        ({"halving": {"factor": 1, "rungs": [0.5]}}, "halving: got"),
        ({"halving": {"factor": 2, "rungs": [0.5, 0.5]}}, "halving: got"),
    ],
)
def test_an_error_names_the_file_and_the_key(make_sweep: MakeSweep, keys: dict[str, Any], problem: str) -> None:
    file = make_sweep(**keys)
    with pytest.raises(BadInput) as error:
        read_sweep(file)
    assert str(error.value).startswith(str(file))
    assert problem in str(error.value)
