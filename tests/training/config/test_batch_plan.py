"""Batch plan: steps, epochs, legal world sizes, and what is due when."""

from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import TINY_MODEL, TINY_TRAIN
from tests.training.config.test_train_config import run_directory
from training.config.batch_plan import Plan, count_due, make_plan, microbatch_sizes
from training.config.train_config import load_run


def plan(folder: Path, world_size: int, **keys: int) -> Plan:
    """Return the plan of the tiny run with some other keys."""
    run = load_run(run_directory(folder, TINY_MODEL, {"dataset": "x"} | TINY_TRAIN | keys), [])
    return make_plan(run.train, run.model.context_length, world_size)


@pytest.mark.parametrize(("checkpoint", "validation"), [(3, 4), (4, 4), (6, 4), (7, 100), (1, 5)])
def test_what_is_due_is_counted_without_walking_over_the_steps(checkpoint: int, validation: int) -> None:
    for last in range(1, 30):
        for first in range(1, last + 1):
            saves = [step for step in range(first, last + 1) if step % checkpoint == 0 or step == last]
            validations = [step for step in range(first, last + 1) if step % validation == 0 or step in saves]
            assert count_due(first, last, checkpoint) == len(saves)
            assert count_due(first, last, checkpoint, validation) == len(validations)


def test_microbatches_are_the_divisors_of_a_ranks_share() -> None:
    for batch in range(1, 60):
        for ranks in (1, 2, 3):
            sizes = [size for size in range(1, batch + 1) if batch % (size * ranks) == 0]
            assert microbatch_sizes(batch, ranks) == sizes
            assert microbatch_sizes(batch, ranks, 5) == [size for size in sizes if size <= 5]


def test_a_world_size_that_does_not_divide_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"5 does not divide; the nearest world sizes that do: 1, 2, 3, 4, 6, 12$"):
        plan(tmp_path / "r", 5, global_batch_size=24)


def test_legal_world_sizes_of_an_enormous_batch_are_those_nearby_and_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"do: 26928, .*, 28600, 29120, .*, 31200$"):
        plan(tmp_path / "r", 1001 * 29, microbatch_size=1, global_batch_size=735_134_400)  # 1,344 divisors


def test_more_steps_than_a_checkpoints_name_has_digits_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"train\.json: got 35,184,372,088,832 steps of 8 sequences, wanted at most 99,999"
    ):
        plan(tmp_path / "r", 1, min_train_tokens=1 << 53, max_epochs=1 << 53)


def test_accumulation_that_contradicts_the_global_batch_is_refused(tmp_path: Path) -> None:
    assert plan(tmp_path / "r", 1, gradient_accumulation_steps=4).layout.accumulation == 4
    with pytest.raises(BadInput, match="gradient_accumulation_steps: got 3, but global_batch_size 8 makes it 4"):
        plan(tmp_path / "r", 1, gradient_accumulation_steps=3)
