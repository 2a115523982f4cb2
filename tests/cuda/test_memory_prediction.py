"""The peak of torch's allocator on emulated GPUs, compared with the prediction of the memory model."""

import json
from typing import Any

import attrs
import pytest

from tests.cuda.measured import EIGHT_RANKS, Layout, case, measure
from tests.model.architectures import NANOCHAT, QWEN3

BELOW, ABOVE = 0.02, 0.05  # a prediction that is too low can make a run fail; one that is too high costs little
THRIFT = ("recompute_blocks=true", "loss_chunks=8")
ON_A100 = (*EIGHT_RANKS[::4], *EIGHT_RANKS[3::4])  # DDP with determinism "off", and FSDP with "elastic"
SHAPES = [
    *EIGHT_RANKS,
    *(attrs.evolve(layout, gpu="a100-80gb") for layout in ON_A100),
    Layout(size="124M", microbatch=16),
    Layout(size="124M", microbatch=16, accumulation=8, world_size=8, determinism="elastic"),
    Layout(size="124M", microbatch=16, settings=("optimizer=muon",)),
    Layout(size="124M", microbatch=16, world_size=8, settings=("optimizer=muon",)),
    Layout(size="124M", microbatch=16, world_size=8, settings=THRIFT),
    Layout(size="124M", microbatch=16, settings=("recompute_blocks=true",)),
    Layout(size="124M", microbatch=16, settings=("loss_chunks=4",)),
    Layout(size="124M", microbatch=64),
    Layout(size="350M", microbatch=16, world_size=8),
    Layout(size="124M", microbatch=16, world_size=8, settings=("tensor_parallel=2",)),
    Layout(size="350M", microbatch=16, world_size=8, parallel="fsdp", settings=("tensor_parallel=4",)),
    Layout(size="774M", microbatch=8, world_size=8, parallel="fsdp"),
    Layout(size="1.5B", microbatch=4),
    Layout(size="1.5B", microbatch=4, determinism="elastic"),
    Layout(size="1.5B", microbatch=4, accumulation=8, world_size=8, parallel="fsdp", determinism="elastic"),
    Layout(size="1.5B", microbatch=8, world_size=8, parallel="fsdp", settings=THRIFT),
    Layout(size="1.5B", microbatch=4, settings=("optimizer=muon", "recompute_blocks=true")),
]


@pytest.mark.parametrize("layout", [case(layout) for layout in SHAPES])
def test_peak_memory_is_predicted_within_5_percent(
    layout: Layout,
) -> None:
    measured = measure(layout)
    peak = max(measured.first_peak, measured.later_peak)
    assert 1 - BELOW <= measured.predicted / peak <= 1 + ABOVE
    assert measured.reserved_peak <= measured.predicted_reserved
    # Recomputed blocks reserve more memory than the limit below (docs/memory.md). So do tensor ranks, which use some
    # buffers only briefly.
    if not any(setting.startswith(("recompute_blocks", "tensor_parallel")) for setting in layout.settings):
        assert measured.reserved_peak <= 1.03 * peak


def settings_of(model: dict[str, Any]) -> tuple[str, ...]:
    """Return settings of model.json in the form that --set takes."""
    return tuple(f"model.{key}={json.dumps(value)}" for key, value in model.items())


NANOCHAT_OF_SIX_HEADS = settings_of(NANOCHAT | {"n_heads": 6})
MODERN = [
    Layout(size="124M", microbatch=16, settings=NANOCHAT_OF_SIX_HEADS),
    Layout(size="124M", microbatch=16, settings=(*NANOCHAT_OF_SIX_HEADS, "model.logit_softcap=15")),
    Layout(size="124M", microbatch=16, settings=settings_of(QWEN3 | {"mlp_width": 2048, "n_kv_heads": 4})),
]


@pytest.mark.parametrize("layout", [case(layout) for layout in MODERN])
def test_peak_memory_of_modern_blocks_is_predicted(layout: Layout) -> None:
    measured = measure(layout)
    assert measured.predicted == pytest.approx(max(measured.first_peak, measured.later_peak), rel=0.03)
