"""One rank of a trial: full steps on random tokens, in a process that may run out of memory and be killed.

Orders come, and answers go, over the store of worker_pool.py. A rank that ran out of memory says so and then holds
still: its peers wait for it in a collective until all of them are killed.
"""

import gc
import json
import os
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import attrs
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # missing from its __all__

from common.errors import EXIT_ERROR, BadInput
from model.gpt import GPT
from training.build import make_settings, make_state
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.exactness.fingerprint import resolve_numerics
from training.exactness.levels import set_determinism
from training.launch import environment_rank
from training.parallel.process_group import Ranks, start, torchrun_store
from training.planning.memory_model import HEADROOM
from training.self_test import random_batches
from training.state import StepSettings, TrainState
from training.step import train_step
from training.supervision.heartbeat import SPEAKER_SECONDS

# Of a step: at least two, for the gradients of one are there when another one's activations come.
MICRO_STEPS = {"off": 2, "run": 2, "elastic": 8}
ALIVE_SECONDS = 1.0  # between two looks for the process that gives the orders
# Of CUDA and NCCL; cuBLAS; cuBLAS and cuDNN where no memory is left for a handle; cuDNN 9; a CPU.
MEMORY_WORDS = (
    "out of memory",
    "ALLOC_FAILED",
    "STATUS_NOT_INITIALIZED",
    "ALLOCATION_FAILED",
    "can't allocate memory",
)


@attrs.frozen(kw_only=True)
class Order:
    """A trial, the same for all ranks."""

    number: int
    group: int  # which processes do it: another number, other processes
    microbatch_size: int
    steps: int  # 0: only say what memory there is
    extra_sums: int  # elastic sums of all gradients that the run will hold beyond those of MICRO_STEPS


@attrs.frozen(kw_only=True)
class Verdict:
    """How a trial went, of all ranks together."""

    outcome: str  # "fits", "memory", "late" or "error"
    rank: int | None = None  # which one it was that did not fit
    reason: str = ""


@attrs.frozen(kw_only=True)
class Report:
    """What a rank measured in a trial, in bytes; None on a CPU."""

    allocated: int | None = None  # at the peak
    reserved: int | None = None  # likewise: with what the allocator holds back
    usable: int | None = None  # of the GPU, by torch's allocator: without headroom and what others hold


@attrs.frozen(kw_only=True)
class Post:
    """Where a rank of a trial gets its orders."""

    prefix: str  # of keys in the store
    first_order: int
    commander: int  # pid of the process that has started this one
    gpu_bytes: int | None = None  # to get by with, as if the GPU had no more; None: all


def serve(run: Run, device: str | None, post: Post) -> NoReturn:
    """Carry out orders until killed."""
    threading.Thread(target=_end_with, args=(post.commander,), daemon=True).start()
    store, number = PrefixStore(post.prefix, torchrun_store()), post.first_order
    with suppress(dist.DistError):  # whose store it is has been killed, and this process will be
        try:
            state, settings, ranks = _start(run, device)
            while (content := json.loads(store.get(f"order {number}"))) is not None:
                order = Order(**content)
                settings = attrs.evolve(
                    settings, layout=attrs.evolve(settings.layout, microbatch_size=order.microbatch_size)
                )
                report = _carry_out(state, settings, ranks, order, post.gpu_bytes)
                _answer(store, ranks, order, report)
                number += 1
        except Exception as error:  # noqa: BLE001  # whatever it was, the others must be told
            _report_error(store, number, error)
    while True:
        time.sleep(ALIVE_SECONDS)


def vote(store: Any, number: int, verdict: Verdict) -> None:
    """Make it the trial's verdict, unless there is one: the first one counts, for all ranks."""
    store.compare_set(f"verdict {number}", "", json.dumps(attrs.asdict(verdict)))


def is_memory_error(error: Exception) -> bool:
    """Tell whether there was too little memory: libraries below torch raise errors of other kinds."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def take_steps(state: TrainState, settings: StepSettings, ranks: Ranks, steps: int) -> None:
    """Take whole steps on random tokens, at the shape of the layout."""
    next_batch = random_batches(settings.layout, state.parallel.network.config.vocab_size, ranks)
    for step in range(steps):
        train_step(state, settings, ranks, step, next_batch)


def _report_error(store: Any, number: int, error: Exception) -> None:
    """Say it to all, with a traceback where it is neither of memory nor the user's to mend."""
    memory, key = is_memory_error(error), f"verdict {number}"
    reason = str(error).partition("\n")[0] or type(error).__name__
    if not memory:
        time.sleep(SPEAKER_SECONDS)  # perhaps only a collective, whose other end was lost: told by its commander
        if not isinstance(error, BadInput) and not store.check([key]):
            traceback.print_exception(error)
    vote(store, number, Verdict(outcome="memory" if memory else "error", rank=environment_rank(), reason=reason))


def _start(run: Run, device: str | None) -> tuple[TrainState, StepSettings, Ranks]:
    ranks = start(device, run.train.timeout_seconds)
    train = run.train.replace(global_batch_size=None, gradient_accumulation_steps=1, min_train_tokens=10**15)
    run = attrs.evolve(run, train=train)
    numerics = resolve_numerics(run, make_plan(run, ranks.world_size), ranks)
    run = attrs.evolve(run, train=train.replace(gradient_accumulation_steps=MICRO_STEPS[numerics.determinism]))
    set_determinism(numerics.determinism, train.execution.cpu_threads, ranks)
    with ranks.device:  # any weights will do, and a GPU makes them in no time
        network = GPT(run.model, recompute_blocks=train.memory.recompute_blocks, loss_chunks=train.memory.loss_chunks)
    plan = make_plan(run, ranks.world_size)
    return make_state(network, run, plan, numerics, ranks), make_settings(run, plan, numerics), ranks


def _carry_out(state: TrainState, settings: StepSettings, ranks: Ranks, order: Order, gpu_bytes: int | None) -> Report:
    """Take the order's steps. Raises what an allocation raises, and torch.OutOfMemoryError where one was close."""
    device = ranks.device
    torch._dynamo.reset()  # another shape is another graph, and torch.compile allows few of one function
    gc.collect()
    if device.type != "cuda":
        take_steps(state, settings, ranks, order.steps)
        return Report()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(max(0, _usable_bytes(device, gpu_bytes)) / total, device)
    parameters = sum(parameter.numel() for parameter in state.parallel.network.parameters())
    sums = torch.empty(order.extra_sums, parameters, device=device)  # fp32
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    take_steps(state, settings, ranks, order.steps)
    torch.cuda.synchronize(device)
    del sums
    if torch.cuda.memory_stats(device).get("num_alloc_retries", 0) > before:
        raise torch.OutOfMemoryError("the allocator had to empty its cache to go on: slow, and next to failing")
    reserved = torch.cuda.max_memory_reserved(device)
    usable = _usable_bytes(device, gpu_bytes)  # again: libraries load, and take memory, with their first use
    if reserved > usable:
        raise torch.OutOfMemoryError(f"less than {HEADROOM:.0%} of the GPU would be left")
    return Report(allocated=torch.cuda.max_memory_allocated(device), reserved=reserved, usable=usable)


def _usable_bytes(device: torch.device, gpu_bytes: int | None) -> int:
    """Return what torch's allocator may hold: what it holds and what is free, headroom off.

    `gpu_bytes`: as if the GPU had no more than that.
    """
    free, total = torch.cuda.mem_get_info(device)
    size = total if gpu_bytes is None else min(gpu_bytes, total)
    return free + torch.cuda.memory_reserved(device) - (total - size) - int(HEADROOM * size)


def _answer(store: Any, ranks: Ranks, order: Order, report: Report) -> None:
    """Say what was measured; the last rank to say so makes it fit."""
    store.set(f"report {order.number} {ranks.rank}", json.dumps(attrs.asdict(report)))
    if store.add(f"fitting {order.number}", 1) == ranks.world_size:
        vote(store, order.number, Verdict(outcome="fits"))


def _end_with(commander: int) -> None:
    """End this process when the other one has ended, wherever this one's main thread waits."""
    parent = os.getppid()  # changes also where the other one is dead, but nobody has asked for its exit status
    with suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(commander, 0)
            time.sleep(ALIVE_SECONDS)
    os._exit(EXIT_ERROR)
