"""Worker of the batch-size search, one per rank: full steps on random tokens, until it is killed.

A rank that runs out of memory reports that to the store of worker_pool.py and waits: its peers hang in a collective
until all workers are killed.
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
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # missing from its __all__

from common.errors import EXIT_ERROR, BadInput
from model.config import INITIAL_STD
from training.build import make_network, make_settings, make_state
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.exactness.fingerprint import resolve_numerics, set_determinism
from training.hardware.memory_errors import is_memory_error
from training.launch import environment_rank
from training.parallel.process_group import Ranks, start, torchrun_store
from training.parallel.sharding import local_tensor
from training.planning.memory_model import HEADROOM
from training.self_test import random_batches
from training.state import StepSettings, TrainState
from training.step import train_step
from training.supervision.heartbeat import SPEAKER_SECONDS

# Micro-steps of a trial's step: at least two, so that gradients are held while activations are computed.
MICRO_STEPS = {"off": 2, "run": 2, "elastic": 8}
ALIVE_SECONDS = 1.0  # between checks of the parent process


@attrs.frozen(kw_only=True)
class Trial:
    """A micro-batch to try, the same on all ranks."""

    number: int
    group: int  # generation of worker processes that runs it
    microbatch_size: int
    steps: int  # 0: report the usable memory only
    extra_sums: int  # fp32 copies of all gradients that elastic sums of the real run hold beyond the trial's


@attrs.frozen(kw_only=True)
class Verdict:
    """Outcome of a trial, one for all ranks."""

    outcome: str  # "fits", "memory", "late" or "error"
    rank: int | None = None  # that did not fit
    reason: str = ""


@attrs.frozen(kw_only=True)
class Report:
    """Memory of one rank in a trial, in bytes; None on a CPU."""

    allocated: int | None = None  # peak
    reserved: int | None = None  # peak, the allocator's cache included
    usable: int | None = None  # by torch's allocator: less headroom and the memory of other processes


@attrs.frozen(kw_only=True)
class WorkerSettings:
    """Settings of a worker process: where its trials come from."""

    prefix: str  # of its keys in the store
    first_trial: int
    group: int  # of this worker; a trial of a later group is for those that replace it
    parent_pid: int
    gpu_bytes: int | None = None  # memory of a smaller GPU to imitate; None: all of this one's


def serve(run: Run, device: str | None, worker: WorkerSettings) -> NoReturn:
    """Run trials until killed."""
    threading.Thread(target=_end_with, args=(worker.parent_pid,), daemon=True).start()
    store, number = PrefixStore(worker.prefix, torchrun_store()), worker.first_trial
    with suppress(dist.DistError):  # the store's owner was killed, and so will be this process
        try:
            state, settings, ranks = _start(run, device)
            while (content := json.loads(store.get(f"trial {number}"))) is not None:
                trial = Trial(**content)
                if trial.group != worker.group:
                    break  # to be killed
                layout = attrs.evolve(settings.layout, microbatch_size=trial.microbatch_size)
                settings = attrs.evolve(settings, layout=layout)
                report = _carry_out(state, settings, ranks, trial, worker.gpu_bytes)
                _answer(store, ranks, trial, report)
                number += 1
        except Exception as error:  # noqa: BLE001  # whatever it was, the others must be told
            _report_error(store, number, error)
    while True:
        time.sleep(ALIVE_SECONDS)


def vote(store: Any, number: int, verdict: Verdict) -> None:
    """Propose a trial's verdict; the first one counts, for all ranks."""
    store.compare_set(f"verdict {number}", "", json.dumps(attrs.asdict(verdict)))


def take_steps(state: TrainState, settings: StepSettings, ranks: Ranks, steps: int) -> None:
    """Take whole steps on random tokens, at the shape of the layout."""
    next_batch = random_batches(settings.layout, state.parallel.network.config.vocab_size, ranks)
    for step in range(steps):
        train_step(state, settings, step, next_batch)


def _report_error(store: Any, number: int, error: Exception) -> None:
    """Report an error to all ranks, with a traceback unless it is a user error or one of memory."""
    memory, key = is_memory_error(error), f"verdict {number}"
    reason = str(error).partition("\n")[0] or type(error).__name__
    if not memory:
        time.sleep(SPEAKER_SECONDS)  # perhaps only a collective that lost its peer: the peer's parent reports the cause
        if not isinstance(error, BadInput) and not store.check([key]):
            traceback.print_exception(error)
    vote(store, number, Verdict(outcome="memory" if memory else "error", rank=environment_rank(), reason=reason))


def _start(run: Run, device: str | None) -> tuple[TrainState, StepSettings, Ranks]:
    ranks = start(device, run.train.timeout_seconds)
    train = run.train.replace(global_batch_size=None, gradient_accumulation_steps=1, min_train_tokens=1)
    plan = make_plan(train, run.model.context_length, ranks.data_parallel.size)
    numerics = resolve_numerics(run.train, ranks.device)
    microbatches = MICRO_STEPS[numerics.determinism] * ranks.data_parallel.size
    layout = attrs.evolve(plan.layout, microbatches=microbatches)
    plan = attrs.evolve(plan, layout=layout)
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    state = make_state(make_network(run.model), run.train, plan, numerics, ranks)
    for parameter in state.parallel.named_parameters().values():  # any weights will do, and a GPU draws them in no time
        nn.init.normal_(local_tensor(parameter), std=INITIAL_STD)
    return state, make_settings(run.train, plan, numerics), ranks


def _carry_out(state: TrainState, settings: StepSettings, ranks: Ranks, trial: Trial, gpu_bytes: int | None) -> Report:
    """Take a trial's steps. Raises allocation errors, and torch.OutOfMemoryError for a trial that barely fits."""
    device = ranks.device
    torch._dynamo.reset()  # another shape is another graph, and torch.compile allows few of one function
    gc.collect()
    if device.type != "cuda":
        take_steps(state, settings, ranks, trial.steps)
        return Report()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(max(0, _usable_bytes(device, gpu_bytes)) / total, device)
    parameters = sum(parameter.numel() for parameter in state.parallel.network.parameters())
    sums = torch.empty(trial.extra_sums, parameters, device=device)  # fp32
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    take_steps(state, settings, ranks, trial.steps)
    torch.cuda.synchronize(device)
    del sums
    if torch.cuda.memory_stats(device).get("num_alloc_retries", 0) > before:
        raise torch.OutOfMemoryError("the allocator had to empty its cache: slow, and close to failing")
    reserved = torch.cuda.max_memory_reserved(device)
    usable = _usable_bytes(device, gpu_bytes)  # again: libraries load, and take memory, with their first use
    if reserved > usable:
        raise torch.OutOfMemoryError(f"less than {HEADROOM:.0%} of the GPU would be left")
    return Report(allocated=torch.cuda.max_memory_allocated(device), reserved=reserved, usable=usable)


def _usable_bytes(device: torch.device, gpu_bytes: int | None) -> int:
    """Return the bytes that torch's allocator may hold: held and free memory, less headroom.

    `gpu_bytes`: memory of a smaller GPU to imitate.
    """
    free, total = torch.cuda.mem_get_info(device)
    size = total if gpu_bytes is None else min(gpu_bytes, total)
    return free + torch.cuda.memory_reserved(device) - (total - size) - int(HEADROOM * size)


def _answer(store: Any, ranks: Ranks, trial: Trial, report: Report) -> None:
    """Report the measurements; the last rank to do so decides that the trial fits."""
    store.set(f"report {trial.number} {ranks.rank}", json.dumps(attrs.asdict(report)))
    if store.add(f"fitting {trial.number}", 1) == ranks.world_size:
        vote(store, trial.number, Verdict(outcome="fits"))


def _end_with(parent_pid: int) -> None:
    """End this process when its parent has ended, wherever the main thread waits."""
    parent = os.getppid()  # changes even where the dead parent's exit status has not been collected
    with suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(parent_pid, 0)
            time.sleep(ALIVE_SECONDS)
    os._exit(EXIT_ERROR)
