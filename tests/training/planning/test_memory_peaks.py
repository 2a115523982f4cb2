"""Moments of a step: predicted peaks are those of torch's own allocator on emulated GPUs."""

from typing import Any

import pytest

from model.config import GPT2_SIZES
from training.config.key_groups import MemoryOptions
from training.planning.memory_model import GIB, THRIFTY, MemoryModel

RECOMPUTED = MemoryOptions(recompute_blocks=True)
CHUNKED = MemoryOptions(loss_chunks=8)


ELASTIC = {"world_size": 8, "determinism": "elastic"}
SHARDED = {"world_size": 8, "parallel": "fsdp"}


# benchmarks/emulated_steps.py's peaks on the H100, torch 2.13.0; for all shapes: tests/cuda/test_memory_prediction.py.
@pytest.mark.parametrize(
    ("size", "microbatch_size", "accumulation", "settings", "gib"),
    [
        ("124M", 16, 2, {}, 8.619),
        ("124M", 64, 1, {}, 27.467),
        ("124M", 32, 2, {"options": RECOMPUTED}, 6.421),
        ("124M", 32, 2, {"options": CHUNKED}, 12.598),
        ("124M", 64, 2, {"options": THRIFTY}, 6.205),
        ("350M", 32, 2, {}, 34.952),
        ("124M", 16, 1, {"world_size": 8}, 8.618),
        ("124M", 16, 8, ELASTIC, 10.011),
        ("124M", 16, 1, SHARDED, 7.099),
        ("124M", 16, 4, SHARDED | ELASTIC, 8.013),
        ("774M", 16, 2, SHARDED | {"options": RECOMPUTED}, 9.054),
        ("1.5B", 8, 2, SHARDED, 32.204),
        ("1.5B", 8, 8, SHARDED | ELASTIC, 43.810),
    ],
)
def test_the_largest_moment_is_the_measured_peak(
    size: str, microbatch_size: int, accumulation: int, settings: dict[str, Any], gib: float
) -> None:
    memory = MemoryModel(model=GPT2_SIZES[size], accumulation=accumulation, **settings)
    assert memory.predict(microbatch_size).allocated / GIB == pytest.approx(gib, rel=0.01)


def test_a_larger_micro_batch_may_fit_where_a_smaller_one_has_more_sums() -> None:
    memory = MemoryModel(model=GPT2_SIZES["1.5B"], world_size=8, determinism="elastic", global_batch_size=512)
    assert memory.predict(2).total < memory.predict(1).total
    assert (memory.largest_microbatch(memory.predict(2).total) or 0) >= 2
