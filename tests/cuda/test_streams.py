"""Accesses of two streams to one tensor are ordered: torch's CUDA sanitizer over steps on emulated GPUs."""

import pytest

from tests.conftest import ROOT
from tests.cuda.emulated import run


@pytest.mark.oldest_torch
@pytest.mark.parametrize("determinism", ["off", "elastic"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_no_tensor_is_used_on_two_streams_without_order(parallel: str, determinism: str) -> None:
    done = run(ROOT / "tests" / "cuda" / "sanitized_steps.py", parallel, determinism, determinism=determinism)
    assert done.returncode == 0, done.stderr[-4000:]
    streams = int(done.stdout.split()[-1])
    assert streams > 1 or (parallel, determinism) == ("ddp", "off")  # there NCCL alone has a stream, which torch orders
