"""DDP's buckets: they hold the gradients of every micro-batch, and are reduced in the last one only."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from tests.conftest import TINY_MODEL
from training.parallel.mesh import Levels
from training.parallel.process_group import ALONE, Ranks
from training.parallel.step_clock import StepClock
from training.parallel.wrap import BucketSum, Parallel, wrap_in_ddp


@pytest.fixture
def parallel(alone: Ranks) -> Parallel:
    """Return a network under DDP; parallelize() wraps none on a single rank."""
    network = GPT(ModelConfig(**TINY_MODEL))
    initialize(network, 0)
    reduction = BucketSum(dist.group.WORLD)
    clock = StepClock(alone.device)
    wrapped = wrap_in_ddp(NextTokenLoss(network), reduction, clock)
    places = {"levels": Levels(inside=ALONE), "data_parallel": ALONE}
    parts = places | {"gradient_divisor": 3, "reduction": reduction, "clock": clock}
    return Parallel(network=network, model=wrapped, **parts)


def test_only_the_last_micro_batch_is_reduced_and_all_add_up_in_the_buckets(
    parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def counting(buffer: torch.Tensor, **options: Any) -> Any:
        reduced.append(len(buffer))
        return all_reduce(buffer, **options)

    monkeypatch.setattr(dist, "all_reduce", counting)
    config = parallel.network.config
    batch = torch.randint(config.vocab_size, (3, config.context_length + 1))
    for _ in range(2):
        reduced.clear()
        for number, row in enumerate(batch.split(1)):
            assert reduced == []
            with parallel.gradient_sync(enabled=number == 2):
                parallel.model(row[:, :-1], row[:, 1:]).backward()
            # Fewer than parameters: each is a view of a bucket, none a copy beside it.
            buckets = {gradient.untyped_storage().data_ptr() for gradient in parallel.gradients()}
            assert len(buckets) < len(parallel.gradients()) / 2
        assert sum(reduced) == sum(parameter.numel() for parameter in parallel.named_parameters().values())
        found = [gradient.clone() for gradient in parallel.gradients()]
        parallel.zero_grad()
    bare = NextTokenLoss(parallel.network)
    for row in batch.split(1):
        bare(row[:, :-1], row[:, 1:]).backward()
    for ours, theirs in zip(found, parallel.gradients(), strict=True):
        assert torch.equal(ours, theirs)
