"""The pool of training jobs, which trains several runs of an experiment at a time under one budget.

A run whose job was killed is resumed.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_STOPPED, BadInput
from common.files import open_locked
from common.launch import SETTINGS_OF_EXPERIMENT, SETTINGS_VARIABLE
from common.output import keep_logs_only
from experiments.shared.account import Account
from experiments.shared.job_end import LEAST_SECONDS, TABLE_SECONDS, ended_over_budget, failure_of
from experiments.shared.pool_display import PoolDisplay
from experiments.shared.run_progress import RunProgress, Target, read_progress
from experiments.shared.training_jobs import PoolDevices, PoolOptions, train_command
from training.supervision.run_lock import lock_is_held
from training.supervision.training_process import TrainingProcess
from training.telemetry.time_ledger import read_earlier

EXPERIMENT_LOCK = ".experiment.lock"
LAST_CALL_SECONDS = 2.0  # time to wait for another call that is about to end
POOL_POLL_SECONDS = 0.2
KILL_SECONDS = 1.5  # jobs that have not stopped are killed this long before the end of the budget
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class PoolStopped(Exception):
    """Training ended early. Checkpoints were saved, so running the same command again continues the runs.

    The message states the reason and names the unfinished runs.
    """


@attrs.frozen
class Job:
    """A process that trains a target, and its devices: GPU numbers or, if the process trains on a CPU, slot numbers."""

    target: Target
    process: TrainingProcess
    devices: list[str]


class RunPool:
    """Context manager that trains the runs in an experiment's `directory`, several at a time.

    Only one process at a time can use a directory.
    """

    def __init__(self, directory: Path, options: PoolOptions):
        self._directory, self._options = directory, options
        self._signal: int | None = None
        self._jobs: list[Job] = []
        self._problem: str | None = None  # the error message of the first job that failed
        self._over_budget = False
        self._stop_requested = False  # whether all jobs were asked to stop

    def __enter__(self) -> "RunPool":
        keep_logs_only()
        contention = f"{self._directory}: another experiment.py is using this directory; wait for it, or stop it"
        self._lock = open_locked(self._directory / EXPERIMENT_LOCK, contention, wait_seconds=LAST_CALL_SECONDS)
        self._devices = PoolDevices.of(self._options)
        self.account = Account(self._directory, self._options)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop_jobs()  # if this process failed, jobs may still be running
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.account.close()
        self._lock.close()

    def train(self, runs: Mapping[Path, int | None]) -> None:
        """Train runs to the given steps; None stands for a run's last step. Raise errors as `reach` does."""
        self.reach([Target.of(run, step, self._options.ranks) for run, step in runs.items()])

    def reach(self, targets: Sequence[Target]) -> None:
        """Train runs to their targets.

        Raise BadInput if a job fails, PoolStopped after a signal or at the end of the budget, and KeyboardInterrupt
        after SIGINT.
        """
        for target in targets:
            target.done = target.end(read_progress(target.directory)) is not None
        waiting = [target for target in targets if not target.done]
        self._over_budget = False
        with closing(PoolDisplay(targets, self.account)) as display:
            while self._jobs or (waiting and not self._stopping):
                self._start(waiting, display)
                time.sleep(POOL_POLL_SECONDS)
                if self._signal is not None or self._problem is not None:
                    self._stop_jobs()  # called after `_start`, so that a job that has just been started is stopped, too
                for job in list(self._jobs):
                    self._handle_end(job, waiting, display)
                if self._jobs:
                    self.account.beat()
                self._enforce_budget()
                display.show()
        if self._problem is not None:
            raise BadInput(self._problem)
        missing = [target for target in targets if not target.done]
        if missing or self._signal is not None:
            self._raise_stopped(missing, len(targets))

    @property
    def _stopping(self) -> bool:
        return self._signal is not None or self._problem is not None or self._over_budget

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = number

    def _start(self, waiting: list[Target], display: PoolDisplay) -> None:
        """Start jobs while there are free devices, for runs that no other process is training."""
        locked = [target for target in waiting if lock_is_held(target.directory)]
        for target in locked:
            if not target.awaited:
                target.awaited = True
                display.say(f"{target.name}: an earlier job is still training this run; waiting for that job")
        if locked and self.account.after_kill:
            self.account.beat()
            return  # a job of a killed call still uses devices until it has saved a checkpoint
        for target in [target for target in waiting if target not in locked]:
            if target.awaited and target.end(progress := read_progress(target.directory)) is not None:
                waiting.remove(target)
                self._finish(target, progress, display)
                continue
            devices = self._devices.free([job.devices for job in self._jobs])
            seconds_left = self.account.seconds_left()
            if devices is None or self._stopping:
                return
            if seconds_left is not None and seconds_left < LEAST_SECONDS:
                self._over_budget = True
                return
            waiting.remove(target)
            self._jobs.append(Job(target, self._launch(target, devices, seconds_left), devices))
            display.say(f"{target.name}: training to step {target.step:,} of {target.last_step:,}")

    def _launch(self, target: Target, devices: list[str], seconds_left: float | None) -> TrainingProcess:
        hours = None
        if seconds_left is not None:  # the limit of train.py includes the time of the run's earlier jobs
            hours = (read_earlier(target.directory, 0.0).seconds + seconds_left - TABLE_SECONDS) / 3600
        until = target.step if target.step < target.last_step else None
        command = train_command(target.directory, self._options, until_step=until, hours=hours, code=target.code)
        # If this call is killed, the next call charges the time since the last line of the account. A line must
        # therefore be written before the job starts.
        self.account.beat()
        environment = self._devices.environment(devices) | {SETTINGS_VARIABLE: SETTINGS_OF_EXPERIMENT}
        return TrainingProcess(target.directory, command, environment)

    def _handle_end(self, job: Job, waiting: list[Target], display: PoolDisplay) -> None:
        """If a job has ended, remove it from the list of jobs and record its outcome."""
        if (end := job.process.end()) is None:
            return
        self._jobs.remove(job)
        target, progress = job.target, read_progress(job.target.directory)
        over_budget = ended_over_budget(end, progress, self.account.seconds_left())
        if target.end(progress) is not None and end.status in (EXIT_DONE, EXIT_DIVERGED):
            self._finish(target, progress, display)
        elif end.status == EXIT_STOPPED or self._stopping:
            self._over_budget |= over_budget and self._signal is None and self._problem is None
            if not self._stopping:
                self._signal = signal.SIGTERM  # the job was stopped by a signal, so the experiment stops as well
        elif lock_is_held(target.directory):
            waiting.insert(0, target)
        elif over_budget:
            self._over_budget = True
        else:
            self._problem = failure_of(target, end, job.process.log)

    def _finish(self, target: Target, progress: RunProgress, display: PoolDisplay) -> None:
        """Record and print that a run has reached its target or has diverged."""
        target.done = True
        loss = progress.losses.get(target.step)
        details = "" if loss is None else f", validation loss {loss:.4f}"
        if progress.diverged:
            details = f": {progress.diverged}"
        display.say(f"{target.name}: {target.end(progress)}{details}")

    def _stop_jobs(self) -> None:
        """Ask all jobs to save a checkpoint and end. A second call does nothing."""
        if not self._stop_requested:
            self._stop_requested = True
            for job in self._jobs:
                job.process.ask_to_stop()

    def _enforce_budget(self) -> None:
        seconds_left = self.account.seconds_left()
        if seconds_left is not None and seconds_left < KILL_SECONDS:
            self._over_budget = True
            for job in self._jobs:
                job.process.kill()

    def _raise_stopped(self, missing: list[Target], count: int) -> None:
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        seconds_left = max(0.0, self.account.seconds_left() or 0.0)
        reason = f"{seconds_left:.0f} s of the budget are left, but a job needs {LEAST_SECONDS:.0f} s"
        command = "run the same command with a larger budget"
        if self._signal is not None:
            reason, command = f"stopped by {signal.Signals(self._signal).name}", "run the same command"
        unfinished = ", ".join(f"{target.name} ({target.describe()})" for target in missing)
        raise PoolStopped(
            f"{reason}: {count - len(missing)} of {count} runs are done; unfinished: {unfinished}; "
            f"{self.account.describe()} spent; to continue, {command}"
        )
