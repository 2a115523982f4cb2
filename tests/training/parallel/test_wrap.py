"""The wrapper of a network: how it is chosen, the divisor of reduced gradients, DDP's buckets, and plain names."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from tests.conftest import TINY_MODEL
from tests.training.parallel.conftest import default_ranks
from training.parallel.mesh import Levels
from training.parallel.process_group import ALONE, Ranks
from training.parallel.step_clock import StepClock
from training.parallel.wrap import BucketSum, Parallel, compile_model, parallelize, wrap_in_ddp
from training.precision import Numerics

CONFIG = ModelConfig(**TINY_MODEL)


pytestmark = pytest.mark.usefixtures("alone")


def wrap(kind: str, determinism: str, microbatches: int = 6) -> Parallel:
    network = GPT(CONFIG)
    initialize(network, 0)
    numerics = Numerics(determinism=determinism, precision="fp32", compiled=False)
    return parallelize(NextTokenLoss(network), kind, numerics, microbatches, default_ranks())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("determinism", ["off", "run", "elastic"])
def test_one_rank_needs_no_wrapper(kind: str, determinism: str) -> None:
    parallel = wrap(kind, determinism)
    assert not isinstance(parallel.model, FSDPModule | DistributedDataParallel)
    assert parallel.named_parameters().keys() == dict(GPT(CONFIG).named_parameters()).keys()


@pytest.mark.parametrize("determinism", ["off", "run", "elastic"])
def test_step_gradients_match_those_of_the_global_batch(determinism: str) -> None:
    batch = torch.randint(CONFIG.vocab_size, (6, CONFIG.context_length + 1), generator=torch.Generator().manual_seed(0))
    parallel, reference = wrap("ddp", determinism), GPT(CONFIG)
    initialize(reference, 0)
    NextTokenLoss(reference)(batch[:, :-1], batch[:, 1:]).backward()
    for number, row in enumerate(batch.split(1)):
        with parallel.gradient_sync(enabled=number == 5):
            parallel.model(row[:, :-1], row[:, 1:]).backward()
    for gradient, parameter in zip(parallel.gradients(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(gradient / 6, parameter.grad, rtol=1e-4, atol=1e-7)
    parallel.zero_grad()
    assert parallel.gradients() == []


def test_only_the_last_micro_batch_is_reduced(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    network = GPT(CONFIG)
    initialize(network, 0)
    reduction, clock = BucketSum(dist.group.WORLD), StepClock(alone.device)
    # On a single rank, parallelize() does not wrap the network.
    model = wrap_in_ddp(NextTokenLoss(network), reduction, clock, dist.group.WORLD)
    places: dict[str, Any] = {"levels": Levels(inside=ALONE), "data_parallel": ALONE}
    parallel = Parallel(network=network, model=model, reduction=reduction, clock=clock, **places)
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def counting_all_reduce(buffer: torch.Tensor, **options: Any) -> Any:
        reduced.append(len(buffer))
        return all_reduce(buffer, **options)

    monkeypatch.setattr(dist, "all_reduce", counting_all_reduce)
    batch = torch.randint(CONFIG.vocab_size, (3, CONFIG.context_length + 1))
    for _ in range(2):
        reduced.clear()
        for number, row in enumerate(batch.split(1)):
            assert reduced == []
            with parallel.gradient_sync(enabled=number == 2):
                parallel.model(row[:, :-1], row[:, 1:]).backward()
            # Gradients share storages, which shows that they are views of buckets, and not copies.
            buckets = {gradient.untyped_storage().data_ptr() for gradient in parallel.gradients()}
            assert len(buckets) < len(parallel.gradients()) / 2
        assert sum(reduced) == sum(parameter.numel() for parameter in parallel.named_parameters().values())
        reduced_gradients = [gradient.clone() for gradient in parallel.gradients()]
        parallel.zero_grad()
    bare = NextTokenLoss(network)
    for row in batch.split(1):
        bare(row[:, :-1], row[:, 1:]).backward()
    for reduced_gradient, reference_gradient in zip(reduced_gradients, parallel.gradients(), strict=True):
        assert torch.equal(reduced_gradient, reference_gradient)


def test_blocks_head_and_loss_are_separate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def record_compilation(function: Any, **options: Any) -> Any:
        assert options == {"fullgraph": True, "dynamic": False}
        compiled.append(getattr(function, "__self__", function).__class__.__name__)
        return function

    monkeypatch.setattr(torch, "compile", record_compilation)
    model = NextTokenLoss(GPT(CONFIG))
    with torch._dynamo.config.patch(optimize_ddp=True):  # not monkeypatch, which would delete the setting afterwards
        compile_model(model, False)
        assert compiled == []
        compile_model(model, True)
        assert compiled == ["Block", "Block", "function", "function"]
        compile_model(model, "model")
        assert compiled[4:] == ["NextTokenLoss"]
        assert not torch._dynamo.config.optimize_ddp
