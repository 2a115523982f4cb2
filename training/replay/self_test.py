"""Determinism self-test: check that the gradients of a step repeat bit for bit on this machine.

For CPUs, the test suite checks this. On a GPU, whether gradients repeat depends on the kernels that cuBLAS, attention
and torch.compile choose for this model on this card. Therefore, a run does this test before its first step and prints
the outcome.
"""

import hashlib
import math
import os

import attrs
import torch
from torch import Tensor

from common.launch import setting
from common.output import Notice, warning
from tokens.batches.micro_batches import MicroBatch
from tokens.batches.sampling import Layout
from training.grad_norm import global_grad_norm
from training.parallel.mesh import local_tensor
from training.parallel.process_group import Ranks, gather
from training.precision import Numerics
from training.state import StepSettings, TrainState
from training.step import NextBatch, run_microbatches

STEP = 0  # the step whose dropout masks are used


@attrs.frozen(kw_only=True)
class SelfTest:
    """Outcome of the self-test, which is the same on every rank. Its fields are also the fields of an event."""

    held: bool  # whether all gradients were the same in both runs
    differing: list[str]  # names of the parameters whose gradients differed
    tensors: int  # number of gradients that were compared


def self_test(state: TrainState, settings: StepSettings, ranks: Ranks) -> SelfTest:
    """Compare the gradients of two runs of the same step on random tokens. The state does not change.

    Call it on every rank.
    """
    scale = state.loss_scale.scale.clone()
    first, norm = _gradients(state, settings, ranks)
    # Only a comparison of finite gradients is meaningful, because infinities repeat whatever the kernels do.
    while state.loss_scale.dynamic and not math.isfinite(norm) and not state.loss_scale.exhausted().item():
        state.loss_scale.scale.mul_(0.5)
        first, norm = _gradients(state, settings, ranks)
    second, _ = _gradients(state, settings, ranks)
    state.loss_scale.scale.copy_(scale)
    local_names = [name for name, digest in first.items() if second[name] != digest]
    differing = {name for names in gather(ranks, local_names) for name in names}
    ordered = [name for name in first if name in differing]
    return SelfTest(held=not ordered, differing=ordered, tensors=len(first))


def describe(outcome: SelfTest, numerics: Numerics) -> str | Notice:
    """Return the outcome as a line to print, with advice if gradients differed."""
    level = f"determinism {numerics.determinism}"
    if outcome.held:
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        compiled = "compiled" if numerics.compiled else "not compiled"
        kernels = f"deterministic attention, cuBLAS workspace {workspace}, {compiled}"
        return (
            f"self-test: the gradients of one step repeat bit for bit ({kernels}), as {level} requires; nothing else "
            "was compared"
        )
    first, count, tensors = outcome.differing[0], len(outcome.differing), outcome.tensors
    advice = f"try {setting(compile=False)}; " if numerics.compiled else ""
    return warning(
        f"self-test: gradients of the same step differ between two runs (first: {first}; {count} of {tensors} "
        f"tensors). {level} does not hold on this machine, and this run can be repeated only up to rounding; {advice}"
        f"{setting(determinism='off')} gives the same guarantee and is faster"
    )


def _gradients(state: TrainState, settings: StepSettings, ranks: Ranks) -> tuple[dict[str, str], float]:
    """Run the step, and clear its gradients afterwards.

    Returns the hash of this rank's shard of each gradient, and the global norm of the gradients.
    """
    next_batch = random_batches(settings.layout, state.parallel.network.config.vocab_size, ranks)
    run_microbatches(state, settings, STEP, next_batch)
    norm = global_grad_norm(state.parallel, settings.numerics.determinism).item()
    named = state.parallel.named_parameters().items()
    digests = {name: _sha256(parameter.grad) for name, parameter in named if parameter.grad is not None}
    state.parallel.zero_grad()
    return digests, norm


def random_batches(layout: Layout, vocabulary_size: int, ranks: Ranks) -> NextBatch:
    """Return a function that returns random micro-batches for this rank, always in the same order."""
    generator = torch.Generator().manual_seed(ranks.data_parallel.rank)

    def next_batch() -> MicroBatch:
        shape = (2, layout.microbatch_size, layout.context_length)
        return MicroBatch(*torch.randint(vocabulary_size, shape, generator=generator).to(ranks.device))

    return next_batch


def _sha256(gradient: Tensor) -> str:
    """Return the hash of this rank's shard.

    Shards are copied to the CPU one at a time, because the CPU's memory may not hold all of them.
    """
    part = local_tensor(gradient).detach().cpu().flatten()
    return hashlib.sha256(part.view(torch.uint8).numpy().data).hexdigest()
