"""What takes a quarter of an hour: `make test-long`."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import metrics, train
from tests.walks import Layout, kill_again_and_again, walk

STEPS = 16
LAYOUTS = [Layout(ranks=ranks, parallel=parallel) for ranks in (1, 2, 4, 8) for parallel in ("ddp", "fsdp")]
SMALL = [layout for layout in LAYOUTS if layout.ranks <= 2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_matrix_up_to_eight_ranks_has_one_hash_a_step(make_run: Callable[..., Path], precision: str) -> None:
    hashes = {}
    for layout in LAYOUTS:
        settings = {"parallel": layout.parallel, "precision": precision, "global_batch_size": 16}
        run = make_run(str(layout).replace(" ", "-"), {"drop_rate": 0.1}, min_train_tokens=5 * 16 * 32, **settings)
        done = train(run, "--hash-every", "1", ranks=layout.ranks)
        assert done.returncode == 0, done.stderr
        hashes[str(layout)] = list(metrics(run, "state_sha256").values())
        print(f"{precision}  {layout!s:7}", *(value[:12] for value in hashes[str(layout)]), flush=True)
    assert all(values == hashes["1 ddp"] for values in hashes.values())
    assert len(set(hashes["1 ddp"])) == 5


def test_twenty_random_walks_end_where_the_straight_run_does(make_run: Callable[..., Path]) -> None:
    settings = {"global_batch_size": 16, "min_train_tokens": STEPS * 16 * 32, "checkpoint_interval": 3}
    straight = make_run("straight", {"drop_rate": 0.1}, **settings)
    assert train(straight, "--hash-every", "1", ranks=2).returncode == 0
    draw = random.Random(20)
    for number in range(20):
        run = make_run(f"walk-{number}", {"drop_rate": 0.1}, **settings)
        legs = walk(run, LAYOUTS, STEPS, draw)
        same = all(metrics(run, key) == metrics(straight, key) for key in ("state_sha256", "train_loss", "grad_norm"))
        print(f"walk {number + 1:2}: {'; '.join(legs)}: {'same' if same else 'DIFFERENT'}", flush=True)
        assert same


def test_a_hundred_kills_change_nothing(make_run: Callable[..., Path]) -> None:
    log, hashes = kill_again_and_again(make_run, [*SMALL * 4, *LAYOUTS], kills=100, steps=800, as_user=True)
    assert len(log) == 100
    assert len(hashes) == 1
    print(f"100 kills, one final state: {hashes}", flush=True)
