"""The largest micro-batch of a run on this machine: tried out in processes that may be killed.

A rank that runs out of memory leaves its peers inside a collective, where nothing can reach them. So no process here
ever takes part in one: it starts the processes that do, one for each of its ranks, sees to it that all of them get the
same orders, and kills them as soon as any rank of the job has said that its memory did not suffice.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing from its __all__

from errors import BadInput
from training.claim import restarts
from training.config import Run
from training.edit import check_editable, write_microbatch
from training.memory import GIB, largest_microbatch, predict, remedies
from training.probe import Order, Post, Report, Verdict, vote
from training.ranks import CONNECT_TIMEOUT, environment_rank, environment_world_size, torchrun_store
from training.search import Search, candidates, keeping

PROBE = Path(__file__).parents[1] / "find_batch_size.py"  # what a rank's process runs, with --probe
TRIAL_STEPS = 3  # AdamW's moments come with the first, DDP's final buckets with the second
CONFIRMING_STEPS = 20
SEARCH_SECONDS = 40.0  # then the largest that has fitted is confirmed
TRIAL_SECONDS = 180.0  # one that has not ended is a mistake: compilation takes half a minute
POLL_SECONDS = 0.05


@attrs.frozen(kw_only=True)
class Found:
    """The outcome of a search."""

    microbatch_size: int
    all_tried: bool  # no larger candidate fits; False: time was up


def report_largest(run: Run, overrides: list[str], device: str | None, processes: int | None, write: bool) -> None:
    """Find the largest micro-batch that fits on every rank, say so, and write it where asked.

    `overrides`: those that `run` was read with. `processes`: how many ranks to start here, None: one for each GPU; a
    rank of torchrun's starts its own. Raises BadInput when not even one sequence fits, or a trial fails.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise BadInput(
            "no GPU here; --predict a100-40gb predicts for one, --device cpu tries the search on this machine"
        )
    if write:
        check_editable(run, overrides)
    command = [str(PROBE), str(run.directory), *(f"--set={override}" for override in overrides)]
    command += [] if device is None else [f"--device={device}"]
    if "RANK" in os.environ:
        team = Team(command, torchrun_store(), {environment_rank(): {}})
    else:
        processes = processes or (torch.cuda.device_count() if device != "cpu" else 1)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
        team = Team(command, store, _places(store.port, processes))
    try:
        if environment_rank() == 0:
            found = _lead(run, team)
            print("\n".join(_summary(run, team.world_size, found)), flush=True)
            if write:
                changed = write_microbatch(run, found.microbatch_size)
                print(f"{run.directory / 'train.json'}: {'written' if changed else 'it says so already'}", flush=True)
        else:
            team.follow()
    finally:
        team.kill()


class Team:
    """The processes of this process's ranks, and the store over which all of the job hear of each other."""

    def __init__(self, command: list[str], store: Any, places: dict[int, dict[str, str]]):
        # `places`: what the environment of each rank's process has besides this one's
        self.world_size = max(environment_world_size(), len(places))
        self._command = command
        self._places = places
        self._prefix = f"finder {restarts()}"
        self._store = PrefixStore(self._prefix, store)
        self._group = -1
        self._number = 0  # of the next order
        self._processes: list[Any] = []

    def order(self, microbatch_size: int, steps: int, *, fresh: bool = False) -> tuple[Verdict, list[Report]]:
        """Have all ranks of the job try a micro-batch; return how it went, and each rank's measurements if it fits.

        In the processes of the trial before, unless they have been killed; `fresh`: in new ones.
        """
        number = self._number
        group = self._group if self._processes and not fresh else self._group + 1
        order = Order(number=number, group=group, microbatch_size=microbatch_size, steps=steps)
        self._store.set(f"order {number}", json.dumps(attrs.asdict(order)))
        verdict = self._carry_out(order)
        if verdict.outcome == "error":
            raise BadInput(f"rank {verdict.rank}, micro-batch {microbatch_size}: {verdict.reason}")
        if verdict.outcome == "memory":
            return verdict, []
        texts = [self._store.get(f"report {number} {rank}") for rank in range(self.world_size)]
        return verdict, [Report(**json.loads(text)) for text in texts]

    def dismiss(self) -> None:
        """Tell the other processes like this one that there are no more orders."""
        self._store.set(f"order {self._number}", "null")

    def follow(self) -> None:
        """Do what the first of these processes orders, to the end."""
        while (content := json.loads(self._wait_for(f"order {self._number}"))) is not None:
            self._carry_out(Order(**content))

    def kill(self) -> None:
        """End this process's ranks, wherever they are, and wait until their memory is free."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the helpers that torch.compile has started
        for process in self._processes:
            process.wait()
        self._processes = []

    def _carry_out(self, order: Order) -> Verdict:
        if order.group != self._group:
            self.kill()
            self._start(order)
        deadline = time.monotonic() + TRIAL_SECONDS
        key = f"verdict {order.number}"
        while not self._store.check([key]):
            for rank, process in zip(self._places, self._processes, strict=True):
                if process.poll() is not None:
                    ended = f"its process ended with status {process.returncode}"
                    vote(self._store, order.number, Verdict(outcome="error", rank=rank, reason=ended))
            if time.monotonic() > deadline:
                silence = f"no answer for {TRIAL_SECONDS:.0f} s"
                vote(self._store, order.number, Verdict(outcome="error", rank=min(self._places), reason=silence))
            time.sleep(POLL_SECONDS)
        verdict = Verdict(**json.loads(self._store.get(key)))
        if verdict.outcome != "fits":
            self.kill()
        self._number += 1
        return verdict

    def _start(self, order: Order) -> None:
        self._group = order.group
        post = Post(prefix=self._prefix, first_order=order.number, commander=os.getpid())
        command = [sys.executable, *self._command, "--probe", json.dumps(attrs.asdict(post))]
        # A group meets under a number of its own, as one that torchrun has started anew would; not under its watch.
        environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(1000 * (restarts() + 1) + order.group)}
        environment.pop("TORCHELASTIC_RUN_ID", None)
        for place in self._places.values():
            self._processes.append(subprocess.Popen(command, env=environment | place, start_new_session=True))

    def _wait_for(self, key: str) -> str:
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        return self._store.get(key).decode()


def _lead(run: Run, team: Team) -> Found:
    """Decide what is tried, say how it went, return what is confirmed."""
    search = Search(candidates(run, team.world_size))
    deadline = time.monotonic() + SEARCH_SECONDS
    try:
        _, reports = team.order(1, 0)
        guess = _guess(run, team.world_size, reports)
        while True:
            size = search.next(guess)
            while size is not None and (search.largest is None or time.monotonic() < deadline):
                reports = _try(team, search, size, TRIAL_STEPS)
                guess = _guess(run, team.world_size, reports, size) if reports else guess
                size = search.next(guess)
            if search.largest is None:
                raise BadInput(
                    f"{run.directory}: not even one sequence of {run.model.context_length} tokens fits; "
                    + remedies(run.model, run.train.parallel, team.world_size)
                )
            winner = search.largest
            if _try(team, search, winner, CONFIRMING_STEPS):
                return Found(microbatch_size=winner, all_tried=search.next(None) is None)
    finally:
        team.dismiss()


def _try(team: Team, search: Search, size: int, steps: int) -> list[Report]:
    """Try a micro-batch, in processes as fresh as a run's where it is to be confirmed; [] when it does not fit."""
    verdict, reports = team.order(size, steps, fresh=steps == CONFIRMING_STEPS)
    search.learn(size, fits=bool(reports))
    print(f"micro-batch {size}, {steps} steps: {_describe(verdict, reports)}", flush=True)
    return reports


def _describe(verdict: Verdict, reports: list[Report]) -> str:
    if not reports:
        return f"does not fit on rank {verdict.rank}: {verdict.reason}"
    allocated = [report.allocated for report in reports if report.allocated is not None]
    if not allocated:
        return "fits"
    rank = allocated.index(max(allocated))
    held, usable = reports[rank].reserved or 0, reports[rank].usable or 0
    return (
        f"fits, at its peak {allocated[rank] / GIB:.2f} GiB allocated, {held / GIB:.2f} reserved of {usable / GIB:.2f} "
        f"(rank {rank})"
    )


def _guess(run: Run, world_size: int, reports: list[Report], size: int | None = None) -> int | None:
    """Return the largest micro-batch by prediction, corrected by what `size` took; None on a CPU."""
    usable = [report.usable for report in reports if report.usable is not None]
    if not usable:
        return None
    kind, scale = run.train.parallel, 1.0
    if size is not None:
        measured = max(report.allocated or 0 for report in reports)
        scale = measured / predict(run.model, kind, world_size, size).allocated
    return largest_microbatch(run.model, kind, world_size, int(min(usable) / scale)) or 1


def _summary(run: Run, world_size: int, found: Found) -> list[str]:
    size, batch = found.microbatch_size, run.train.global_batch_size
    lines = []
    if not found.all_tried:
        lines.append(f"{SEARCH_SECONDS:.0f} s were up: a larger one may fit")
    if batch is not None:
        accumulation = batch // (size * world_size)
        lines.append(
            f"largest micro-batch that fits and keeps the global batch: {size} "
            f"({batch} = {size} x accumulation {accumulation} x world size {world_size})"
        )
        return lines
    lines.append(f"largest micro-batch that fits: {size}")
    keeps = keeping(run, world_size, size)
    if keeps is not None:
        lines.append(
            f"without global_batch_size in train.json the global batch follows it; {keeps} keeps what it is now"
        )
    return lines


def _places(port: int, processes: int) -> dict[int, dict[str, str]]:
    """Return what tells each of so many processes on this machine its place, as torchrun would."""
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {rank: {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)}
