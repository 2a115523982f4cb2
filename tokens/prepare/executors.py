"""Executors of units: this process, worker processes, or a Ray cluster. All of them write the same bytes."""

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

UNITS_AHEAD = 4  # units in flight per worker; a unit that waits to be committed takes disk space
RESTARTS = 5  # how many times all workers may be restarted before another unit finishes
CONNECT_SECONDS = 10.0


class Executor:
    """Computes units in this process, one at a time. Subclasses compute them elsewhere, in any order."""

    window = 1  # units in flight

    def submit(self, job: EncodeJob, task: Task) -> "Future[Result]":
        """Start a unit. The future raises BrokenExecutor if a worker is killed."""
        future: Future[Result] = Future()
        future.set_result(run_unit(job, task))
        return future

    def restart(self) -> None:
        """Replace workers that were killed."""
        raise AssertionError("this executor has no workers")

    def close(self) -> None:
        """Cancel unfinished units."""


class Processes(Executor):
    """Computes units in processes on this machine."""

    def __init__(self, workers: int):
        self.window = UNITS_AHEAD * workers
        self._workers = workers
        self.restart()

    def submit(self, job: EncodeJob, task: Task) -> "Future[Result]":
        # A unit of many small files has a long task, so tasks are passed in files. If a task were sent through a pipe,
        # and the workers ended before they had received all of it, Python 3.10 would wait forever.
        path = job.directory / f"{task.index:08d}.task"
        replace_file(path, json.dumps(attrs.asdict(task)))
        try:
            return self._pool.submit(_run_stored_task, job, path)
        except BrokenExecutor as error:  # a worker has been killed since the last result
            future: Future[Result] = Future()
            future.set_exception(error)
            return future

    def restart(self) -> None:
        self._pool, self._line = start_workers(self._workers)

    def close(self) -> None:
        self._line.close()  # ends workers even while they compute; units that were not committed are computed again
        self._pool.shutdown(cancel_futures=True)


class RayCluster(Executor):
    """Computes units as tasks of a Ray cluster whose machines share the inputs, the output and this repository."""

    def __init__(self, address: str | None):
        """Join the cluster at `address`. If `address` is None, start a cluster on this machine for this command."""
        try:
            import ray
        except ImportError as error:
            raise BadInput("--executor ray: the package ray is not installed; pip install ray") from error
        try:
            if address is not None and ":" in address:  # Ray itself would wait for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            # Ray's workers use the sys.path of this process.
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError if Ray or Python versions differ
            raise BadInput(
                f"--ray-address {address}: no cluster answers there: {error}; start one with ray start"
            ) from error
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
        elif isinstance(error, self._ray.exceptions.RayTaskError):  # contains the task's exception, with its traceback
            future.set_exception(error.cause)
        else:
            future.set_exception(BrokenExecutor(str(error)))

    def restart(self) -> None:
        raise BadInput(
            f"the Ray cluster lost a unit and all {RESTARTS} retries of it; check the cluster's machines, then rerun "
            "the same command"
        )

    def close(self) -> None:
        self._ray.shutdown()


def start_workers(count: int) -> tuple[ProcessPoolExecutor, Connection]:
    """Return a pool of processes that ignore Ctrl-C, and a connection. Closing the connection ends the processes."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of pyarrow's threads
    receiver, line = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, _begin_worker, (receiver,))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit SIG_IGN, and later set their own handler
    try:
        for _ in range(count):  # each submission starts a process, so that its imports run before the first task
            pool.submit(os.getpid)
    except BrokenExecutor:
        pass  # a worker has already been killed, so the first task will raise the error
    finally:
        signal.signal(signal.SIGINT, handler)
    return pool, line


def in_order(executor: Executor, job: EncodeJob, tasks: Iterator[Task]) -> Iterator[list[Result]]:
    """Yield the results in batches, in the order of the tasks. Each batch contains the results that are ready.

    Up to `window` units are in flight. If a unit fails, its exception is raised.
    """
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
        except BrokenExecutor:  # a pool raises this error for all its units
            restarts += 1
            if restarts > RESTARTS:
                units = f"units {ahead[0][0].index} to {ahead[-1][0].index} were computed"
                problem = f"workers were killed {restarts} times in a row while {units}"
                raise BadInput(f"{problem}; if memory was short, pass fewer --workers") from None
            executor.restart()
            for index, (task, future) in enumerate(ahead):
                if not future.done() or future.exception() is not None:
                    ahead[index] = task, executor.submit(job, task)
        if results:
            yield results


def _run_stored_task(job: EncodeJob, path: Path) -> Result:
    """Run the task that a file contains, and delete the file. Raises BadInput if the file is damaged."""
    advice = "rerun the same command, which writes it again"
    with refusing(f"{path}: damaged", advice):
        task = structured(read_json(path, advice=advice, most_bytes=LARGEST_PLAN_BYTES), Task)
    result = run_unit(job, task)
    path.unlink(missing_ok=True)
    return result


def _begin_worker(line: Connection) -> None:
    """End this worker when its coordinator ends for any reason. Ignore Ctrl-C, which the coordinator handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def listen() -> None:
        with suppress(EOFError, OSError):
            line.recv()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
