"""The ladder file: its contents, its errors, and the rules for batch and learning rate."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from experiments.ladder.ladder_file import read_ladder, scaled_batch, scaled_rate, size_name
from tests.conftest import ROOT, MakeRun
from tests.experiments.conftest import MakeLadder


def test_sizes_are_sorted(make_ladder: MakeLadder) -> None:
    ladder = read_ladder(make_ladder(sizes=[{"n_layers": 1, "emb_dim": width} for width in (24, 8, 16)]))
    assert list(map(size_name, ladder.sizes)) == ["1x8", "1x16", "1x24"]
    assert ladder.seeds == read_ladder(make_ladder(target=ladder.target.directory, seeds=None)).seeds == (42,)
    assert ladder.rates == (0.005, 0.01, 0.02) and ladder.train["max_epochs"] == 999


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rate": [1]}, "unknown key 'rate'; did you mean 'rates'"),
        ({"sizes": [{"n_layers": 1}]}, "sizes: got .*expected 3 or more"),
        ({"sizes": [{"emb_dim": 8}, {"emb_dim": 8}, {"emb_dim": 16}]}, "sizes: two sizes have the same name, 2x8, or"),
        ({"sizes": [{"vocab_size": 8}, {"emb_dim": 8}, {"emb_dim": 16}]}, "sizes: 'vocab_size'"),
        ({"sizes": [{"emb_dim": 9}] * 3}, "sizes: {'emb_dim': 9}: emb_dim: got 9, wanted a multiple"),
        ({"rates": [0.01]}, "rates: got .*expected a list of 2 or more ascending"),
        ({"rates": [0.01, 0.0101]}, "each rate must be 1.2 to 4 times the previous"),
        ({"tokens_per_parameter": [2, 1]}, "tokens_per_parameter: got .*ascending"),
        ({"set": {"train.microbatch_size": 0}}, "ladder.json: set: microbatch_size: got 0, wanted an integer"),
        ({"set": {"train.microbatch_size": None}}, "set: microbatch_size: got None, wanted an integer"),
        ({"set": {"train.microbatch_size": "4"}}, "set: microbatch_size: got '4', wanted an integer"),
        ({"set": {"train.validation_interval": None}}, "never validates, but the law"),
        ({"target": "/nope"}, "ladder.json: /nope: no such run directory"),
        ({"set": {"train.weight_decay": 0}}, "set: 'train.weight_decay': cannot be changed for a ladder"),
        ({"set": {"train.validation_sequences": 1}}, "set: 'train.validation_sequences'"),
        ({"target": {"validation_interval": None}}, "never validates"),
        ({"target": {"global_batch_size": None}}, "has no global_batch_size; set this key"),
    ],
)
def test_errors_name_the_key(make_ladder: MakeLadder, make_run: MakeRun, keys: dict[str, Any], message: str) -> None:
    if isinstance(keys.get("target"), dict):
        keys = {"target": make_run("incomplete", **keys["target"])}
    with pytest.raises(BadInput, match=message):
        read_ladder(make_ladder(**keys))


def test_the_shipped_ladder_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ladder = read_ladder(ROOT / "ladders" / "laptop.json")
    assert len(ladder.sizes) == 4 and ladder.target.directory == Path("runs/laptop")


def test_eight_times_the_weights_halve_the_rate() -> None:
    assert scaled_rate(0.01, 8_000, 1_000) == 0.005 and scaled_rate(0.004, 5, 5) == 0.004
    assert scaled_rate(0.00235, 108_000_000 * 8, 108_000_000) == 0.001175  # OLMo-core
    sizes = [(16, 8_000, 1_000, 4), (64, 1_000, 8_000, 4), (16, 5, 5, 2)]
    assert [scaled_batch(*size, ranks=1)["global_batch_size"] for size in sizes] == [64, 16, 16]


def test_each_rank_has_at_least_one_micro_batch() -> None:
    for parameters in range(1, 1000, 7):
        for ranks in (1, 2, 3):
            batch = scaled_batch(100, parameters, 1000, 8, ranks)
            count, rest = divmod(batch["global_batch_size"], batch["microbatch_size"])
            assert rest == 0 and count >= ranks and batch["microbatch_size"] <= 8
