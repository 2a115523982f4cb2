"""What takes a quarter of an hour: `make test-long`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import metrics, train
from tests.walks import Layout, kill_again_and_again, walk

STEPS = 16
LAYOUTS = [Layout(ranks=ranks, parallel=parallel) for ranks in range(1, 9) for parallel in ("ddp", "fsdp")]
SMALL = [layout for layout in LAYOUTS if layout.ranks <= 2]

MODERN = {  # transformers' NanoChat, for which dropout is no option
    "norm": "rmsnorm",
    "norm_gain": False,
    "positions": "rope",
    "qk_norm": True,
    "activation": "relu2",
    "biases": False,
    "qkv_bias": False,
    "tie_weights": False,
    "embedding_norm": True,
    "logit_softcap": 15.0,
}
AS_IN_RECORDS = {
    "optimizer": "muon",
    "muon_split_qkv": True,
    "muon_momentum_warmup_steps": 4,
    "matrix_learning_rate": 0.02,
    "head_learning_rate": 0.004,
    "schedule_learning_rate": "warmup_stable_decay",
    "decay_period_percent": 50,
}
GPT2: tuple[dict[str, Any], dict[str, Any]] = ({"drop_rate": 0.1}, {})
NANOCHAT = (MODERN, AS_IN_RECORDS)

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("precision", "model", "recipe"),
    [("fp32", *GPT2), ("bf16", *GPT2), ("bf16", *NANOCHAT)],
    ids=["gpt2-fp32", "gpt2-bf16", "nanochat-bf16"],
)
def test_the_matrix_up_to_eight_ranks_has_one_hash_a_step(
    make_run: Callable[..., Path], precision: str, model: dict[str, Any], recipe: dict[str, Any]
) -> None:
    hashes = {}
    for layout in LAYOUTS:
        settings = recipe | {"parallel": layout.parallel, "precision": precision, "global_batch_size": 16}
        run = make_run(str(layout).replace(" ", "-"), model, min_train_tokens=5 * 16 * 32, **settings)
        done = train(run, "--hash-every", "1", ranks=layout.ranks)
        assert done.returncode == 0, done.stderr
        hashes[str(layout)] = list(metrics(run, "state_sha256").values())
        print(f"{precision}  {layout!s:7}", *(value[:12] for value in hashes[str(layout)]), flush=True)
    assert all(values == hashes["1 ddp"] for values in hashes.values())
    assert len(set(hashes["1 ddp"])) == 5


@pytest.mark.parametrize(("model", "recipe"), [GPT2, NANOCHAT], ids=["gpt2", "nanochat"])
def test_ten_random_walks_end_where_the_straight_run_does(
    make_run: Callable[..., Path], model: dict[str, Any], recipe: dict[str, Any]
) -> None:
    settings = recipe | {"global_batch_size": 16, "min_train_tokens": STEPS * 16 * 32, "checkpoint_interval": 3}
    straight = make_run("straight", model, **settings)
    assert train(straight, "--hash-every", "1", ranks=2).returncode == 0
    draw = random.Random(20)
    for number in range(10):
        run = make_run(f"walk-{number}", model, **settings)
        legs = walk(run, LAYOUTS, STEPS, draw)
        same = all(metrics(run, key) == metrics(straight, key) for key in ("state_sha256", "train_loss", "grad_norm"))
        print(f"walk {number + 1:2}: {'; '.join(legs)}: {'same' if same else 'DIFFERENT'}", flush=True)
        assert same


def test_a_hundred_kills_change_nothing(make_run: Callable[..., Path]) -> None:
    log, hashes = kill_again_and_again(make_run, [*SMALL * 4, *LAYOUTS], kills=100, steps=800, as_user=True)
    assert len(log) == 100
    assert len(hashes) == 1
    print(f"100 kills, one final state: {hashes}", flush=True)
