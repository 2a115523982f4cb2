"""Probe a micro-batch: run full steps on random tokens, in a new process for each rank of the job.

A rank that runs out of memory leaves its peers waiting in a collective, where no message can reach them. Therefore, the
processes of the search do not take part in any collective, and kill all ranks of a probe as soon as there is a verdict.
Under torchrun, each process of the search starts one rank of the probe; without torchrun, a single process starts all
ranks. The ranks communicate through the store of the search.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, Literal, NoReturn

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from common.errors import EXIT_ERROR, BadInput
from common.launch import environment_rank, environment_world_size, restarts
from model.config import INITIAL_STD
from training.build import make_settings, make_state
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.exactness.fingerprint import resolve_numerics, set_determinism
from training.hardware.usable_gpus import is_memory_error
from training.parallel.mesh import local_tensor
from training.parallel.process_group import CONNECT_TIMEOUT, Ranks, start, torchrun_store
from training.planning.memory_model import HEADROOM, MemoryModel
from training.replay.self_test import random_batches
from training.state import StepSettings, TrainState
from training.step import train_step
from training.supervision.heartbeat import SPEAKER_SECONDS

PROBE_STEPS = 5  # DDP has its final buckets only from the second step on
# After this time, a probe is assumed to hang. Compilation takes only half a minute, except on a slow machine.
PROBE_SECONDS = 300.0
STORE_POLL_SECONDS = 0.05


Outcome = Literal["fits", "memory", "late", "error"]


@attrs.frozen(kw_only=True)
class Report:
    """The memory of one rank in a probe, in bytes. All numbers are 0 on a CPU, where memory is not measured."""

    allocated: int = 0  # peak
    reserved: int = 0  # peak, including the allocator's cache
    usable: int = 0  # bytes that torch's allocator may use, excluding headroom and the memory of other processes


@attrs.frozen(kw_only=True)
class Verdict:
    """The outcome of a probe. The first outcome that any rank proposes becomes the verdict of all ranks."""

    outcome: Outcome
    reason: str  # starts with the number of the rank that failed


class Prober:
    """The probe ranks that this process starts, and the store that connects them with the rest of the job."""

    def __init__(self, command: list[str], processes: int):
        """`command` starts one rank. Without torchrun, this process starts `processes` ranks.

        Raises BadInput under a launcher other than torchrun.
        """
        if "RANK" in os.environ:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
                raise BadInput(
                    "the search works with torchrun or without a launcher, but RANK is set and torchrun's store is "
                    "missing"
                )
            store, self._environments = torchrun_store(), {environment_rank(): dict[str, str]()}
        else:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
            self._environments = _rank_environments(store.port, processes)
        self.leads = environment_rank() == 0
        self.world_size = max(environment_world_size(), len(self._environments))
        self._command, self._store = command, store
        self._number = 0  # number of the current probe
        self._processes: list[Any] = []

    def agree(self, size: int | None) -> int | None:
        """Return, on every rank, the micro-batch that the leader tries next, or None at the end of the search.

        `size` is the choice of this rank; only the leader's choice is used.
        """
        key = f"finder {restarts()}: size {self._number}"
        if self.leads:
            self._store.set(key, json.dumps(size))
        while not self._store.check([key]):
            time.sleep(STORE_POLL_SECONDS)
        leaders_size: int | None = json.loads(self._store.get(key))
        return leaders_size

    def probe(self, size: int) -> tuple[Verdict, list[Report]]:
        """Try a micro-batch on all ranks. Return the verdict and, if it fits, the report of each rank.

        Raises BadInput for errors other than a lack of memory or time.
        """
        prefix = f"finder {restarts()}: probe {self._number}"
        store = PrefixStore(prefix, self._store)
        try:
            self._start(prefix, size)
            verdict = self._wait(store)
            ranks = range(self.world_size) if verdict.outcome == "fits" else ()
            reports = [Report(**json.loads(store.get(f"report {rank}"))) for rank in ranks]
        finally:
            self.kill()
        self._number += 1
        if verdict.outcome == "error":
            raise BadInput(f"micro-batch {size}: {verdict.reason}")
        return verdict, reports

    def kill(self) -> None:
        """Kill the ranks of the probe, whatever they are doing, and wait until their memory is free."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # this also kills torch.compile's helper processes
        for process in self._processes:
            process.wait()
        self._processes = []

    def _start(self, prefix: str, size: int) -> None:
        settings = {"prefix": prefix, "microbatch_size": size, "parent_pid": os.getpid()}
        command = [sys.executable, *self._command, "--probe", json.dumps(settings)]
        # Each probe gets its own restart count. Its ranks therefore use new keys in the store, as they do after a
        # restart by torchrun. Because the ranks get no run id, they are not supervised.
        environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(1000 * (restarts() + 1) + self._number)}
        environment.pop("TORCHELASTIC_RUN_ID", None)
        for variables in self._environments.values():
            self._processes.append(subprocess.Popen(command, env=environment | variables, start_new_session=True))

    def _wait(self, store: Any) -> Verdict:
        deadline = time.monotonic() + PROBE_SECONDS
        while not store.check(["verdict"]):
            for rank, process in zip(self._environments, self._processes, strict=True):
                if process.poll() is not None:
                    _propose(store, "error", f"rank {rank}: its process ended with status {process.returncode}")
            if time.monotonic() > deadline:
                _propose(store, "late", f"not all ranks answered within {PROBE_SECONDS:.0f} s")
            time.sleep(STORE_POLL_SECONDS)
        return Verdict(**json.loads(store.get("verdict")))


def run_probe(run: Run, device: str | None, prefix: str, microbatch_size: int, parent_pid: int) -> NoReturn:
    """Run the steps of a probe as one of its ranks, report under `prefix` in the store, and wait to be killed."""
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    store = PrefixStore(prefix, torchrun_store())
    with suppress(dist.DistError):  # the process that has the store was killed, and this one will be killed, too
        try:
            ranks = start(device, run.train.timeout_seconds, run.train.execution.tensor_parallel)
            report = _measure(*_prepare(run, microbatch_size, ranks), ranks)
            store.set(f"report {ranks.rank}", json.dumps(attrs.asdict(report)))
            if store.add("fitting", 1) == ranks.world_size:
                _propose(store, "fits")
        except Exception as error:  # noqa: BLE001  # other ranks must learn of any failure
            _report_error(store, error)
    while True:
        time.sleep(1.0)


def take_steps(state: TrainState, settings: StepSettings, ranks: Ranks, steps: int) -> None:
    """Train for the given number of steps on random tokens."""
    next_batch = random_batches(settings.layout, state.parallel.network.config.vocab_size, ranks)
    for step in range(steps):
        train_step(state, settings, step, next_batch)


def _prepare(run: Run, size: int, ranks: Ranks) -> tuple[TrainState, StepSettings]:
    """Return a run's state and settings for steps that need as much memory as the run's own steps."""
    train = run.train.replace(
        microbatch_size=size, global_batch_size=None, gradient_accumulation_steps=1, min_train_tokens=1
    )
    plan = make_plan(train, run.model.context_length, ranks.world_size)
    numerics = resolve_numerics(run.train, ranks.device)
    # With two micro-batches per rank, the first one's gradients are in memory while the second one's activations are
    # computed. With determinism "elastic", the number of partial sums grows with the number of micro-batches per step,
    # so the probe then uses at least as many micro-batches as the run.
    microbatches = 2 * ranks.data_parallel.size
    if numerics.determinism == "elastic":
        microbatches = max(microbatches, MemoryModel.of(run.model, run.train, ranks.world_size).microbatches_at(size))
    plan = attrs.evolve(plan, layout=attrs.evolve(plan.layout, microbatches=microbatches))
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    state = make_state(run.model, train, plan, numerics, ranks)
    # Any weights will do, and random normal weights take a GPU almost no time.
    for parameter in state.parallel.named_parameters().values():
        nn.init.normal_(local_tensor(parameter), std=INITIAL_STD)
    return state, make_settings(train, plan, numerics)


def _measure(state: TrainState, settings: StepSettings, ranks: Ranks) -> Report:
    """Run the steps, and return their peak memory.

    Raises torch's error if an allocation fails, and torch.OutOfMemoryError if the micro-batch only just fits.
    """
    device = ranks.device
    if device.type != "cuda":
        take_steps(state, settings, ranks, PROBE_STEPS)
        return Report()
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(max(0, usable_bytes(device)) / total, device)
    take_steps(state, settings, ranks, PROBE_STEPS)
    torch.cuda.synchronize(device)
    if torch.cuda.memory_stats(device).get("num_alloc_retries", 0) > 0:
        raise torch.OutOfMemoryError(
            "the allocator had to empty its cache, which is slow and means that memory is almost full"
        )
    reserved = torch.cuda.max_memory_reserved(device)
    usable = usable_bytes(device)  # measured again, because libraries take memory when they are first used
    if reserved > usable:
        raise torch.OutOfMemoryError(f"less than {HEADROOM:.0%} of the GPU's memory would be left")
    return Report(allocated=torch.cuda.max_memory_allocated(device), reserved=reserved, usable=usable)


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that torch's allocator may use: reserved and free memory, minus the headroom."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - int(HEADROOM * total)


def _report_error(store: Any, error: Exception) -> None:
    """Report an error to all ranks. Print a traceback unless the user caused it or memory is exhausted."""
    memory, reason = is_memory_error(error), str(error).partition("\n")[0] or type(error).__name__
    if not memory:
        # A collective may have failed only because a peer has ended. This wait lets the peer's parent report the cause
        # first.
        time.sleep(SPEAKER_SECONDS)
        if not isinstance(error, BadInput) and not store.check(["verdict"]):
            traceback.print_exception(error)
    _propose(store, "memory" if memory else "error", f"rank {environment_rank()}: {reason}")


def _propose(store: Any, outcome: Outcome, reason: str = "") -> None:
    """Propose a verdict. The first proposal becomes the verdict of all ranks."""
    store.compare_set("verdict", "", json.dumps({"outcome": outcome, "reason": reason}))


def _end_with(parent_pid: int) -> None:
    """End this process when the search process has ended, even if the main thread is blocked."""
    parent = os.getppid()  # this id changes when the parent dies, even if nobody collects its exit status
    with suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(parent_pid, 0)
            time.sleep(1.0)
    os._exit(EXIT_ERROR)


def _rank_environments(port: int, processes: int) -> dict[int, dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank on this machine."""
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {rank: {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)}
