"""The processes that try a micro-batch, one for each rank, and those that start, watch and kill them.

Under torchrun each of its ranks has one of them; alone, this process has all. Every trial has a number: its order and
its verdict lie in a store that all of the job can read.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import attrs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing from its __all__

from common.errors import BadInput
from training.batch_finder.worker import Order, Post, Report, Verdict, vote
from training.launch import environment_rank, environment_world_size, restarts
from training.parallel.process_group import CONNECT_TIMEOUT, torchrun_store

TRIAL_SECONDS = 180.0  # one that has not ended hangs, or the machine is slow: compilation takes half a minute
POLL_SECONDS = 0.05


class Team:
    """The processes of this process's ranks, and the store over which all of the job hear of each other."""

    def __init__(self, command: list[str], processes: int, gpu_bytes: int | None = None):
        # `command`: what a rank runs. `processes`: ranks of this process's own, where it is not one of torchrun's.
        # `gpu_bytes`: as of Post. Raises BadInput where neither torchrun nor the user has started this process.
        if "RANK" in os.environ:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
                raise BadInput(
                    "the search needs torchrun, or no launcher: RANK is set, but torchrun's store is not there"
                )
            store, self._places = torchrun_store(), {environment_rank(): dict[str, str]()}
        else:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
            self._places = _places(store.port, processes)
        self.leads = environment_rank() == 0
        self.world_size = max(environment_world_size(), len(self._places))
        self._command = command
        self._gpu_bytes = gpu_bytes
        self._prefix = f"finder {restarts()}"
        self._store = PrefixStore(self._prefix, store)
        self._group = -1
        self._number = 0  # of the next order
        self._processes: list[Any] = []

    def order(
        self, microbatch_size: int, steps: int, extra_sums: int = 0, *, fresh: bool = False
    ) -> tuple[Verdict, list[Report]]:
        """Have all ranks of the job try a micro-batch; return how it went, and each rank's measurements if it fits.

        In the processes of the trial before, unless they have been killed; `fresh`: in new ones. Raises BadInput when
        it failed for another reason than memory or time.
        """
        number = self._number
        group = self._group if self._processes and not fresh else self._group + 1
        order = Order(number=number, group=group, microbatch_size=microbatch_size, steps=steps, extra_sums=extra_sums)
        self._store.set(f"order {number}", json.dumps(attrs.asdict(order)))
        verdict = self._carry_out(order)
        if verdict.outcome == "error":
            where = "" if verdict.rank is None else f"rank {verdict.rank}: "
            raise BadInput(f"micro-batch {microbatch_size}: {where}{verdict.reason}")
        if verdict.outcome != "fits":
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
                silence = f"not all ranks have answered within {TRIAL_SECONDS:.0f} s"
                vote(self._store, order.number, Verdict(outcome="late", reason=silence))
            time.sleep(POLL_SECONDS)
        verdict = Verdict(**json.loads(self._store.get(key)))
        if verdict.outcome != "fits":
            self.kill()
        self._number += 1
        return verdict

    def _start(self, order: Order) -> None:
        self._group = order.group
        post = Post(prefix=self._prefix, first_order=order.number, commander=os.getpid(), gpu_bytes=self._gpu_bytes)
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
