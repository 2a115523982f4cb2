"""Batch plan: steps, epochs, possible world sizes, and the steps at which a run validates or saves."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.conftest import write_run
from tokens.batches.sampling import Layout
from training.config.batch_plan import Plan, count_due, describe_balance, factors, make_plan, microbatch_sizes
from training.config.train_config import load_run


def plan(folder: Path, world_size: int, **keys: Any) -> Plan:
    """Return the plan of the tiny run. `keys` are changes to its train.json."""
    run = load_run(write_run(folder, Path("x"), **keys), [])
    return make_plan(run.train, run.model.context_length, world_size)


@pytest.mark.parametrize(("checkpoint", "validation"), [(3, 4), (4, 4), (6, 4), (7, 100), (1, 5)])
def test_steps_with_validations_and_checkpoints_are_counted(checkpoint: int, validation: int) -> None:
    for last in range(1, 30):
        for first in range(1, last + 1):
            saves = [step for step in range(first, last + 1) if step % checkpoint == 0 or step == last]
            validations = [step for step in range(first, last + 1) if step % validation == 0 or step in saves]
            assert count_due(first, last, checkpoint) == len(saves)
            assert count_due(first, last, checkpoint, validation) == len(validations)


def test_world_size_may_equal_the_number_of_micro_batches(tmp_path: Path) -> None:
    for size in range(1, 13):
        layout = plan(tmp_path / str(size), size, global_batch_size=24).layout
        assert (layout.microbatches, layout.data_parallel_size) == (12, size)
    advice = "too few for world size 13; start at most 12 ranks, or set microbatch_size to 1$"
    with pytest.raises(BadInput, match=f"global_batch_size 24 is 12 micro-batches of 2, {advice}"):
        plan(tmp_path / "more", 13, global_batch_size=24)
    with pytest.raises(BadInput, match=r"too few for world size 25; start at most 12 ranks$"):
        plan(tmp_path / "most", 25, global_batch_size=24)


def test_tensor_parallel_ranks_share_batches(tmp_path: Path) -> None:
    assert plan(tmp_path / "r", 4, tensor_parallel=2).layout.data_parallel_size == 2
    with pytest.raises(BadInput, match=r"train\.json: tensor_parallel: got 2, wanted a divisor of world size 3$"):
        plan(tmp_path / "s", 3, tensor_parallel=2)


def test_indivisible_batch_names_possible_world_sizes(tmp_path: Path) -> None:
    advice = 'set determinism to "elastic", or use another world size, such as 1, 2, 3, 4, 6, 12$'
    with pytest.raises(
        BadInput, match=f"requires an equal number on every rank, which world size 5 does not allow; {advice}"
    ):
        plan(tmp_path / "r", 5, global_batch_size=24, determinism="run")


def test_an_enormous_batch_names_only_nearby_world_sizes(tmp_path: Path) -> None:
    keys = {"microbatch_size": 1, "global_batch_size": 735_134_400, "determinism": "run"}  # 1,344 divisors
    with pytest.raises(BadInput, match=r"such as 26928, .*, 28600, 29120, .*, 31200$"):
        plan(tmp_path / "r", 1001 * 29, **keys)


def test_steps_must_fit_into_a_checkpoints_name(tmp_path: Path) -> None:
    message = r"train\.json: got 35,184,372,088,832 steps of 8 sequences, wanted at most 99,999"
    with pytest.raises(BadInput, match=message):
        plan(tmp_path / "r", 1, min_train_tokens=1 << 53, max_epochs=1 << 53)


def test_accumulation_must_match_the_global_batch(tmp_path: Path) -> None:
    assert plan(tmp_path / "r", 1, gradient_accumulation_steps=4).layout.accumulation == 4
    with pytest.raises(BadInput, match="gradient_accumulation_steps: got 3, but global_batch_size 8 requires 4"):
        plan(tmp_path / "s", 1, gradient_accumulation_steps=3)


def test_micro_batch_sizes_divide_a_ranks_share() -> None:
    for ranks in (1, 2, 3):
        for batch in range(ranks, 60, ranks):
            sizes = [size for size in range(1, batch + 1) if batch % (size * ranks) == 0]
            assert microbatch_sizes(batch, ranks) == sizes
            assert microbatch_sizes(batch, ranks, 5) == [size for size in sizes if size <= 5]


def test_uneven_micro_batch_sizes_keep_ranks_busy() -> None:
    # With these sizes, the ranks are busy 97%, 97%, 89% and 89% of the time. With a size of 16, they would be busy
    # only 67% of the time.
    assert microbatch_sizes(128, 6) == [1, 2, 4, 8]
    assert microbatch_sizes(8, 3) == [1]
    assert microbatch_sizes(8, 3, 1) == [1]
    assert microbatch_sizes(2, 3) == []


def test_unequal_load_of_ranks_is_reported() -> None:
    for ranks, load in (
        (4, None),
        (6, "at most 2 each, 67% of the ranks' time used; 4 ranks would be as fast; microbatch_size 1 would use 89%"),
        (3, "at most 3 each, 89% of the ranks' time used"),
    ):
        layout = Layout(context_length=8, microbatch_size=2, microbatches=8, data_parallel_size=ranks)
        assert describe_balance(layout) == ([] if load is None else [f"8 micro-batches on {ranks} ranks: {load}"])
        even = "micro-batch 2 x accumulation 2 x world size 4"
        assert factors(layout, 1) == (even if ranks == 4 else f"8 micro-batches of 2 on world size {ranks}")
