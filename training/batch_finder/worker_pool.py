"""Worker pool of the batch-size search: starts, watches and kills one worker process per rank.

Under torchrun each rank has one worker; otherwise this process has all of them. Trials are numbered; a trial, its
reports and its verdict are in a store that the whole job reads.
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
from training.batch_finder.worker import Report, Trial, Verdict, WorkerSettings, vote
from training.launch import environment_rank, environment_world_size, restarts
from training.parallel.process_group import CONNECT_TIMEOUT, torchrun_store

TRIAL_SECONDS = 180.0  # a longer trial hangs, or the machine is slow: compilation takes half a minute
POLL_SECONDS = 0.05


class WorkerPool:
    """This process's workers, and the store that connects them with the rest of the job."""

    def __init__(self, command: list[str], processes: int, gpu_bytes: int | None = None):
        # `command` starts a worker; `processes`: how many, unless torchrun started this process; `gpu_bytes`: as in
        # WorkerSettings. Raises BadInput under a launcher other than torchrun.
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

    def run_trial(
        self, microbatch_size: int, steps: int, extra_sums: int = 0, *, fresh: bool = False
    ) -> tuple[Verdict, list[Report]]:
        """Try a micro-batch on all ranks; return the verdict, and each rank's report if it fits.

        Workers of the trial before are used again, unless they were killed or `fresh` is set. Raises BadInput for a
        failure other than memory or time.
        """
        number = self._number
        group = self._group if self._processes and not fresh else self._group + 1
        trial = Trial(number=number, group=group, microbatch_size=microbatch_size, steps=steps, extra_sums=extra_sums)
        self._store.set(f"trial {number}", json.dumps(attrs.asdict(trial)))
        verdict = self._run(trial)
        if verdict.outcome == "error":
            where = "" if verdict.rank is None else f"rank {verdict.rank}: "
            raise BadInput(f"micro-batch {microbatch_size}: {where}{verdict.reason}")
        if verdict.outcome != "fits":
            return verdict, []
        texts = [self._store.get(f"report {number} {rank}") for rank in range(self.world_size)]
        return verdict, [Report(**json.loads(text)) for text in texts]

    def dismiss(self) -> None:
        """Tell the other ranks' pools that there are no more trials."""
        self._store.set(f"trial {self._number}", "null")

    def follow(self) -> None:
        """Run the trials of rank 0's pool until it dismisses this one."""
        while (content := json.loads(self._wait_for(f"trial {self._number}"))) is not None:
            self._run(Trial(**content))

    def kill(self) -> None:
        """Kill the workers, wherever they are, and wait until their memory is free."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with torch.compile's helpers
        for process in self._processes:
            process.wait()
        self._processes = []

    def _run(self, trial: Trial) -> Verdict:
        if trial.group != self._group:
            self.kill()
            self._start(trial)
        deadline = time.monotonic() + TRIAL_SECONDS
        key = f"verdict {trial.number}"
        while not self._store.check([key]):
            for rank, process in zip(self._places, self._processes, strict=True):
                if process.poll() is not None:
                    ended = f"its process ended with status {process.returncode}"
                    vote(self._store, trial.number, Verdict(outcome="error", rank=rank, reason=ended))
            if time.monotonic() > deadline:
                silence = f"not all ranks have answered within {TRIAL_SECONDS:.0f} s"
                vote(self._store, trial.number, Verdict(outcome="late", reason=silence))
            time.sleep(POLL_SECONDS)
        verdict = Verdict(**json.loads(self._store.get(key)))
        if verdict.outcome != "fits":
            self.kill()
        self._number += 1
        return verdict

    def _start(self, trial: Trial) -> None:
        self._group = trial.group
        settings = WorkerSettings(
            prefix=self._prefix,
            first_trial=trial.number,
            group=trial.group,
            parent_pid=os.getpid(),
            gpu_bytes=self._gpu_bytes,
        )
        command = [sys.executable, *self._command, "--probe", json.dumps(attrs.asdict(settings))]
        # A group meets under a number of its own, as one that torchrun has started anew would; not under its watch.
        environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(1000 * (restarts() + 1) + trial.group)}
        environment.pop("TORCHELASTIC_RUN_ID", None)
        for place in self._places.values():
            self._processes.append(subprocess.Popen(command, env=environment | place, start_new_session=True))

    def _wait_for(self, key: str) -> str:
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        return self._store.get(key).decode()


def _places(port: int, processes: int) -> dict[int, dict[str, str]]:
    """Return the environment of each of so many ranks on this machine, as torchrun sets it."""
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {rank: {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)}
