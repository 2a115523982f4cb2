"""A script for tests on emulated GPUs, whose kernels compute nothing: disturbed.py NAME ARGUMENTS.

The script runs the function NAME of this file. If this function only prepares the process for an entry script,
ARGUMENTS are the entry script and its arguments, and the entry script runs afterwards.
"""

import ctypes
import itertools
import math
import os
import runpy
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from tests.fakegpu.recorder import record
from tests.launch import ROOT
from training import loop
from training.guard import Guard
from training.hardware.usable_gpus import use_gpu
from training.parallel.mesh import local_tensor
from training.planning import batch_probe as probe
from training.replay import self_test

BAD_STEP = 1  # counted from 0
# Steps to record, counted from 0. DDP measures itself, and waits for the GPU, in its first ten steps and in every 100th
# step.
FIRST, LAST = 15, 114


def small_second_gpu() -> None:
    """Limit the memory of rank 1's emulated GPU to SECOND_GPU_GIB."""
    if os.environ.get("LOCAL_RANK") == "1":
        os.environ["FAKEGPU_GIB"] = os.environ["SECOND_GPU_GIB"]  # the driver reads it at the first CUDA call


def finite_noise() -> None:
    """Make torch.isfinite accept every number, because computed values are noise."""
    torch.isfinite = lambda _: torch.tensor(True)


def differing_gradients() -> None:
    """Make gradients overflow twice in the self-test, and make rank 1 compute a different gradient each time."""
    norms = itertools.chain([math.inf] * 2, itertools.repeat(1.0))
    plain, counter = self_test.run_microbatches, itertools.count()

    def disturbed(state: Any, settings: Any, step: int, next_batch: Any) -> Any:
        losses = plain(state, settings, step, next_batch)
        if state.parallel.data_parallel.rank == 1:
            gradient = local_tensor(state.parallel.named_parameters()["final_norm.weight"].grad)
            # The values are copied into the gradient, because the emulated driver makes copies but runs no kernels.
            gradient.copy_(torch.full(gradient.shape, float(next(counter))))
        return losses

    self_test.run_microbatches = disturbed
    self_test.global_grad_norm = lambda *_: torch.tensor(next(norms)).cuda()


def bad_step() -> None:
    """Make the guard believe that the loss of rank 1 is not finite in step 2."""
    observe = Guard.observe

    def observe_bad_step(guard: Guard, step: int, *measured: Any) -> Any:
        update_blocked = observe(guard, step, *measured)
        if step == BAD_STEP:
            guard._first_bad.copy_(torch.tensor(step))
            guard._local_loss_bad.copy_(torch.tensor(guard._ranks.rank == 1))
        return update_blocked

    Guard.observe = observe_bad_step


def recorded_loop() -> None:
    """Print how often the host waits for the GPU in the training loop, and which copies make it wait."""
    train_step, stack, recordings = loop.train_step, ExitStack(), []

    def recorded_step(state: Any, settings: Any, step: int, next_batch: Any) -> Any:
        if step == FIRST:
            recordings.append(stack.enter_context(record()))
        elif step == LAST + 1:
            stack.close()
            pageable = [name for name in recordings[0].copies if "pageable" in name]
            print(f"waits: {dict(recordings[0].synchronizations)}, pageable copies: {pageable}", flush=True)
            seconds = state.parallel.clock.totals
            minimum = 0.9e-3 * seconds.steps  # two emulated events are a millisecond apart
            work = "own work in each" if seconds.own > minimum else seconds
            print(f"timed: {seconds.steps} steps, {work}", flush=True)
        return train_step(state, settings, step, next_batch)

    loop.train_step = recorded_step


def sanitized_steps(parallel: str, determinism: str, *more: str) -> None:
    """Run steps of GPT-2 124M with torch's CUDA sanitizer, and print the number of streams in use.

    The network is not compiled, because the sanitizer sees calls of torch's dispatcher, but not Triton's kernels.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import emulated_steps
    from torch.cuda import _sanitizer

    streams = set()
    update = _sanitizer.EventHandler._handle_kernel_launch

    def record_stream(handler: Any, stream: int, *arguments: Any, **named: Any) -> Any:
        streams.add(stream)
        return update(handler, stream, *arguments, **named)

    _sanitizer.EventHandler._handle_kernel_launch = record_stream
    _sanitizer.enable_cuda_sanitizer()
    settings = (f"parallel={parallel}", f"determinism={determinism}", "compile=false", *more)
    layout = emulated_steps.EmulatedLayout(size="124M", microbatch=1, accumulation=2, world_size=8, settings=settings)
    emulated_steps.measure(layout, 1)
    print("streams", len(streams), flush=True)
    os._exit(0)


def trial(*allocations: str) -> None:
    """Run a trial of the batch-size search in which each step makes the given allocations.

    An allocation is torch=GIB or library=GIB. Memory of `torch` is freed at once. Memory of `library` is not freed,
    like the memory that cuBLAS or NCCL allocate when they are first used.
    """

    def allocate(*_: object) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        for word in allocations:
            owner, _, gib = word.partition("=")
            size = int(float(gib) * (1 << 30))
            if owner == "torch":
                torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                driver.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size))

    device = torch.device("cuda", 0)
    use_gpu(device)
    probe.take_steps = allocate
    state = SimpleNamespace(parallel=SimpleNamespace(network=torch.nn.Linear(1, 1)))
    try:
        print(probe._measure(state, None, SimpleNamespace(device=device)))
    except torch.OutOfMemoryError as error:
        print(error)


name, *arguments = sys.argv[1:]
if name in ("sanitized_steps", "trial"):
    globals()[name](*arguments)
else:
    globals()[name]()
    sys.argv = arguments
    runpy.run_path(sys.argv[0], run_name="__main__")
