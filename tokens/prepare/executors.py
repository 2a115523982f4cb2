"""Executors of units: this process, worker processes, or a Ray cluster. All write the same bytes."""

import functools
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from common.checks import structured
from common.errors import BadInput, refusing
from common.files import replace_file
from common.json_files import read_json
from tokens.prepare.encode_unit import EncodeJob, Result, Task, run_unit
from tokens.prepare.plan import LARGEST_PLAN_BYTES

UNITS_AHEAD = 4  # of a worker; units that wait for their commit take disk space
RESTARTS = 5  # of all workers in a row, without a finished unit
CONNECT_SECONDS = 10.0


class Executor:
    """Computes units in this process, one after the other; its subclasses compute them elsewhere, in any order."""

    window = 1  # units in flight

    def submit(self, job: EncodeJob, task: Task) -> "Future[Result]":
        """Begin a unit. The future raises BrokenExecutor if a worker is killed."""
        future: Future[Result] = Future()
        future.set_result(run_unit(job, task))
        return future

    def restart(self) -> None:
        """Replace workers that were killed."""
        raise AssertionError("there is no worker")

    def close(self) -> None:
        """Cancel unfinished units."""


class Processes(Executor):
    """Computes units in processes of this machine."""

    def __init__(self, workers: int):
        self.window = UNITS_AHEAD * workers
        self._workers = workers
        self.restart()

    def submit(self, job: EncodeJob, task: Task) -> "Future[Result]":
        # A unit of many small files is a long task. In a file, none is ever half-way through a pipe when workers end,
        # for which Python 3.10 would wait forever.
        path = job.directory / f"{task.index:08d}.task"
        replace_file(path, json.dumps(attrs.asdict(task)))
        try:
            return self._pool.submit(_run_kept, job, path)
        except BrokenExecutor as error:  # a worker was killed since the last result
            future: Future[Result] = Future()
            future.set_exception(error)
            return future

    def restart(self) -> None:
        self._pool, self._line = start_workers(self._workers)

    def close(self) -> None:
        self._line.close()  # ends workers at any moment: uncommitted units are computed again
        self._pool.shutdown(cancel_futures=True)


class RayCluster(Executor):
    """Computes units as tasks of a Ray cluster whose machines share the inputs, the output and this repository."""

    def __init__(self, address: str | None):
        """Join the cluster at an address; None: start one on this machine for this command."""
        try:
            import ray
        except ImportError as error:
            raise BadInput("--executor ray: the package ray is not installed; pip install ray") from error
        try:
            if address is not None and ":" in address:  # Ray itself waits for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            # Its workers have this process's sys.path.
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: another version of Ray or Python there
            raise BadInput(f"--ray-address {address}: no cluster answers: {error}; start one with ray start") from error
        self._ray = ray
        self._run_unit = ray.remote(num_cpus=1, max_retries=RESTARTS)(run_unit)
        self.window = UNITS_AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, job: EncodeJob, task: Task) -> "Future[Result]":
        reference: Any = self._run_unit.remote(job, task)
        future: Future[Result] = Future()
        reference.future().add_done_callback(functools.partial(self._pass_on, future))
        return future

    def _pass_on(self, future: "Future[Result]", inner: "Future[Result]") -> None:
        error = inner.exception()
        if error is None:
            future.set_result(inner.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):  # what the task raised, and its traceback
            future.set_exception(error.cause)
        else:
            future.set_exception(BrokenExecutor(str(error)))

    def restart(self) -> None:
        raise BadInput("the Ray cluster lost a unit more often than it is retried; check its machines, then rerun")

    def close(self) -> None:
        self._ray.shutdown()


def start_workers(count: int) -> tuple[ProcessPoolExecutor, Connection]:
    """Return processes that ignore Ctrl-C, and a line whose closing ends them at once."""
    context = multiprocessing.get_context("spawn")  # a fork would copy pyarrow's threads' locks
    receiver, line = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, _begin_worker, (receiver,))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by workers until they set their own
    try:
        for _ in range(count):  # each submission begins a process, with its imports, before there is work
            pool.submit(os.getpid)
    except BrokenExecutor:
        pass  # a worker was killed already: the first task will raise it
    finally:
        signal.signal(signal.SIGINT, handler)
    return pool, line


def in_order(executor: Executor, job: EncodeJob, tasks: Iterator[Task]) -> Iterator[list[Result]]:
    """Yield the results in order, in batches of those that are ready, from `window` units ahead. Raises as they do."""
    ahead: deque[tuple[Task, Future[Result]]] = deque()
    restarts = 0
    while True:
        ahead.extend((task, executor.submit(job, task)) for task in islice(tasks, executor.window - len(ahead)))
        if not ahead:
            return
        results: list[Result] = []
        try:
            while ahead and (not results or ahead[0][1].done()):
                results.append(ahead[0][1].result())
                ahead.popleft()
                restarts = 0
        except BrokenExecutor:  # of a pool, for all its units
            restarts += 1
            if restarts > RESTARTS:
                units = f"units {ahead[0][0].index} to {ahead[-1][0].index} were computed"
                problem = f"workers were killed {restarts} times in a row while {units}"
                raise BadInput(f"{problem}; if memory was short, pass fewer --workers") from None
            executor.restart()
            for place, (task, future) in enumerate(ahead):
                if not future.done() or future.exception() is not None:
                    ahead[place] = task, executor.submit(job, task)
        if results:
            yield results


def _run_kept(job: EncodeJob, path: Path) -> Result:
    """Run the task of a file, and delete it. Raises BadInput for a damaged file."""
    advice = "rerun the same command, which writes it anew"
    with refusing(f"{path}: damaged", advice):
        task = structured(read_json(path, advice=advice, most_bytes=LARGEST_PLAN_BYTES), Task)
    result = run_unit(job, task)
    path.unlink(missing_ok=True)
    return result


def _begin_worker(line: Connection) -> None:
    """End this worker when its coordinator ends, however that happens; ignore Ctrl-C, which the coordinator handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def listen() -> None:
        with suppress(EOFError, OSError):
            line.recv()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
