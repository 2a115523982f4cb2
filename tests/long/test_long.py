"""What takes a quarter of an hour: `make test-long`."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import metrics, train
from tests.model.architectures import MUON_RECIPE, NANOCHAT
from tests.training.parallel.test_layouts import VARIANTS, numbers_of, train_on
from tests.walks import Layout, kill_again_and_again, walk

STEPS = 16
LAYOUTS = [Layout(ranks=ranks, parallel=parallel) for ranks, parallel in product(range(1, 9), ("ddp", "fsdp"))]
SMALL = [layout for layout in LAYOUTS if layout.ranks <= 2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("variant", ["fp32", "bf16", "NanoChat with Muon"])
def test_the_matrix_up_to_eight_ranks_has_one_hash_a_step(tmp_path: Path, token_files: Path, variant: str) -> None:
    found = {}
    for layout in LAYOUTS:
        run = VARIANTS[variant].write(tmp_path / str(layout), token_files, token_files)
        train_on(run, variant, f"1x{layout}")
        found[str(layout)] = numbers_of(run)
        print(f"{variant}  {layout!s:7}", *(value[:12] for value in found[str(layout)][0].values()), flush=True)
    assert all(numbers == found["1 ddp"] for numbers in found.values())


@pytest.mark.parametrize(
    ("model", "recipe"), [({"drop_rate": 0.1}, {}), (NANOCHAT, MUON_RECIPE)], ids=["gpt2", "nanochat"]
)
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
