"""Script of tests on emulated GPUs, whose kernels compute nothing: NAME ARGUMENTS.

Runs a function of this file, then SCRIPT ARGUMENTS where the function only prepares an entry script.
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
FIRST, LAST = 15, 114  # counted from 0; DDP measures itself, and waits, in its first ten, and else in each 100th


def small_second_gpu() -> None:
    """On rank 1 the emulated GPU has SECOND_GPU_GIB of memory."""
    if os.environ.get("LOCAL_RANK") == "1":
        os.environ["FAKEGPU_GIB"] = os.environ["SECOND_GPU_GIB"]  # read at the first call of CUDA


def finite_noise() -> None:
    """Every number is finite."""
    torch.isfinite = lambda _: torch.tensor(True)


def differing_gradients() -> None:
    """In the self-test gradients overflow twice, and one of rank 1 is another one each time."""
    norms = itertools.chain([math.inf] * 2, itertools.repeat(1.0))
    plain, counter = self_test.run_microbatches, itertools.count()

    def disturbed(state: Any, settings: Any, step: int, next_batch: Any) -> Any:
        losses = plain(state, settings, step, next_batch)
        if state.parallel.data_parallel.rank == 1:
            gradient = local_tensor(state.parallel.named_parameters()["final_norm.weight"].grad)
            gradient.copy_(torch.full(gradient.shape, float(next(counter))))  # by a copy, which is real
        return losses

    self_test.run_microbatches = disturbed
    self_test.global_grad_norm = lambda *_: torch.tensor(next(norms)).cuda()


def bad_step() -> None:
    """In step 2 the guard sees a loss of rank 1 that is not finite."""
    observe = Guard.observe

    def judged(guard: Guard, step: int, *measured: Any) -> Any:
        held = observe(guard, step, *measured)
        if step == BAD_STEP:
            guard._first_bad.copy_(torch.tensor(step))
            guard._local_loss_bad.copy_(torch.tensor(guard._ranks.rank == 1))
        return held

    Guard.observe = judged


def recorded_loop() -> None:
    """Print the host's waits for the GPU, and copies that make it wait, in steps of the training loop."""
    train_step, whole, recordings = loop.train_step, ExitStack(), []

    def recorded_step(state: Any, settings: Any, step: int, next_batch: Any) -> Any:
        if step == FIRST:
            recordings.append(whole.enter_context(record()))
        elif step == LAST + 1:
            whole.close()
            pageable = [name for name in recordings[0].copies if "pageable" in name]
            print(f"waits: {dict(recordings[0].synchronizations)}, pageable copies: {pageable}", flush=True)
            seconds = state.parallel.clock.totals
            most = 0.9e-3 * seconds.steps  # between two emulated events lies a millisecond
            work = "own work in each" if seconds.own > most else seconds
            print(f"timed: {seconds.steps} steps, {work}", flush=True)
        return train_step(state, settings, step, next_batch)

    loop.train_step = recorded_step


def sanitized_steps(parallel: str, determinism: str, *more: str) -> None:
    """Take steps of GPT-2 124M under torch's CUDA sanitizer; print the number of streams in use.

    Not compiled: the sanitizer sees what passes torch's dispatcher, and Triton's kernels do not.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import emulated_steps
    from torch.cuda import _sanitizer

    streams = set()
    update = _sanitizer.EventHandler._handle_kernel_launch

    def seen(handler: Any, stream: int, *arguments: Any, **named: Any) -> Any:
        streams.add(stream)
        return update(handler, stream, *arguments, **named)

    _sanitizer.EventHandler._handle_kernel_launch = seen
    _sanitizer.enable_cuda_sanitizer()
    settings = (f"parallel={parallel}", f"determinism={determinism}", "compile=false", *more)
    layout = emulated_steps.EmulatedLayout(size="124M", microbatch=1, accumulation=2, world_size=8, settings=settings)
    emulated_steps.measure(layout, 1)
    print("streams", len(streams), flush=True)
    os._exit(0)


def trial(*allocations: str) -> None:
    """Take a trial of the batch-size search; its steps allocate what each argument says, torch=GIB or library=GIB."""

    def allocate(*_: object) -> None:  # `torch` for a moment, `library` for good, as cuBLAS or NCCL at their first use
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
