"""Supervision of a training process: requests to stop, lost ranks, the run lock, the exit record, the exit status.

A process has three phases: start (torch is imported, and the ranks meet), preparation (there is nothing to save yet)
and training. A request to stop may arrive on any rank. It is a signal, a stop on another node, the end of torchrun, or
a budget that is used up.

During training, the request is only noted. Before each step and during a validation, all ranks agree on it
(stop_request.py); a request on one rank makes all ranks save and end as "stopped". Before training, a request ends the
process at once. In preparation, the process first waits for the heartbeats of the other ranks (3 s), because torchrun
also sends a signal to all other ranks after one has died. The heartbeats show whether a rank is "lost" or has ended
with "error". If that rank has recorded its reason, the other ranks end with the same reason and print nothing. Without
such a record, a rank in the start phase cannot know why it was asked to stop. Its "stopped" is then not final: the run
continues if torchrun restarts the ranks. If torchrun ends, a rank ends as "lost" in the start phase; in preparation, it
ends with status 1 and without a record.

After a final "stopped" or "diverged" on several nodes, the ranks end torchrun, which would otherwise restart them
(`end_torchrun`). If it restarts them nevertheless, they end again at once. If the number of nodes has changed, however,
they continue, because torchrun also asks ranks to stop when a node joins.

When a rank is lost, nothing is saved. If its process has died, torchrun ends the other ranks with SIGTERM. If it is
frozen or hangs, the other ranks end as "lost" (heartbeat.py).

If a command trains, its rank 0 holds `.lock` from the start until its process has ended, and writes `exit.json` at the
end (run_lock.py). docs/checkpoints.md lists the outcomes and their causes.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common import launch
from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from common.files import LOCK_POLL_SECONDS
from common.output import advisory, show
from common.redaction import redacted_shell
from training.supervision.run_lock import (
    NODE_VARIABLE,
    ExitRecord,
    JobExit,
    RunLock,
    final_exit,
    lock_is_held,
    take_run_lock,
)

if TYPE_CHECKING:
    from training.supervision.heartbeat import Heartbeat

# In this order: a cloud's notice, Ctrl-C, a batch system's notice, and a closed terminal
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TORCHRUN_SECONDS = 5.0  # time for torchrun to ask its ranks to stop after another node's torchrun has done so
FAILURE_SECONDS = 2.0  # time for a failed rank of this machine to record why it ends
FIRST_RANK_SECONDS = 120.0  # time for the first rank of a node, which draws the chart, to end


class Supervision:
    """Supervision of this process. A process has one such object. It needs no torch until the ranks meet."""

    def __init__(self) -> None:
        """Begin to receive signals."""
        self.stop_requested = threading.Event()
        # How this job ended before torchrun restarted it. None: it was not restarted, or it has to continue.
        self.earlier_exit: JobExit | None = None
        self.run_lock, self.exit_record = RunLock(), ExitRecord(None)
        self._own_disk_lock = RunLock()  # used by the first rank of a node that does not share rank 0's disk
        self._heartbeat: Heartbeat | None = None  # set when the ranks have met
        self.training = False  # if true, requests to stop are only noted
        receive_signals(self._on_signal)

    def lock(self, run_directory: Path) -> None:
        """Lock a run directory, unless this process already holds its lock. Raises BadInput if another job holds it."""
        if self.run_lock.file is not None:
            return
        self.run_lock = take_run_lock(run_directory)
        self.earlier_exit = final_exit(run_directory) if self.run_lock.restarted else None
        if self.earlier_exit is None:
            self.exit_record = ExitRecord(run_directory)

    def join(self, device: str | None, timeout_seconds: int, tensor_parallel: int = 1) -> "Heartbeat":
        """Meet the other ranks, and return this rank's heartbeat.

        Raises BadInput, on this rank alone, if torchrun has ended.
        """
        import torch.distributed as dist

        from training.parallel.process_group import gather, rendezvous_error, start
        from training.supervision.heartbeat import Heartbeat

        try:
            ranks = start(device, timeout_seconds, tensor_parallel)
            self.run_lock.write_job({name for name in gather(ranks, launch.torchrun_identity()) if name is not None})
            lost, stopped, orphaned = self._end_as_lost, self._on_stop_elsewhere, self._on_orphaned
            self._heartbeat = Heartbeat(ranks, timeout_seconds, lost=lost, stopped=stopped, orphaned=orphaned)
        except dist.DistError as error:
            self._end_as_lost()
            raise rendezvous_error() from error
        return self._heartbeat

    def lock_own_disk(self, run_directory: Path) -> None:
        """Lock a run directory that other nodes do not share. Raises BadInput if another job has locked it."""
        if self.run_lock.file is None:
            self._own_disk_lock = take_run_lock(run_directory)

    def end_torchrun(self) -> None:
        """On several nodes, end this node's torchrun if it would restart ranks that have all stopped or diverged.

        If torchrun itself has asked the ranks to stop, this method does not end it: either torchrun ends anyway, or a
        node has joined and the ranks must continue. The torchrun of another node may not have been asked to stop. It
        would then wait for the torchrun of this node.
        """
        torchrun = launch.torchrun_process()
        is_last_start = launch.restarts() >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if torchrun is None or is_last_start or launch.environment_nodes() == 1:
            return
        if self.stop_requested.wait(TORCHRUN_SECONDS):
            return
        # The ranks wait until torchrun asks them to stop. If a rank ended sooner, torchrun would restart all ranks.
        if not launch.is_first_on_machine():
            self.stop_requested.wait(FIRST_RANK_SECONDS)
        elif launch.torchrun_process() == torchrun:
            with suppress(ProcessLookupError):
                os.kill(torchrun, signal.SIGTERM)
            self.stop_requested.wait(TORCHRUN_SECONDS)

    def failure_behind(self, error: Exception) -> launch.Failure | None:
        """Return why another rank has ended, if its end made a collective fail and so caused this rank's error.

        Returns None for any other error.
        """
        from training.parallel.process_group import collective_failed

        if self._heartbeat is None or not collective_failed(error):
            return None
        if not self._heartbeat.beats.departed("failed"):
            return launch.Failure(EXIT_ERROR, "lost-rank", "")
        deadline = time.monotonic() + FAILURE_SECONDS
        while (failure := launch.failure_of_another()) is None and launch.environment_nodes() == 1:
            if time.monotonic() > deadline:
                break
            time.sleep(FAILURE_SECONDS / 20)
        return failure or launch.Failure(EXIT_ERROR, "failed-rank", "another rank has failed; see its output")

    def _end_as_lost(self) -> None:
        self.exit_record.write(EXIT_ERROR, "lost-rank")

    def _on_orphaned(self) -> None:
        if not self.training:
            os._exit(EXIT_ERROR)
        self.stop_requested.set()

    def _on_stop_elsewhere(self) -> None:
        """End this process before training, because a rank of another node was asked to stop."""
        if not (self.training or self.stop_requested.is_set()):  # otherwise this node was asked to stop as well
            self.training = True  # from now on, signals are only noted; torchrun sends one when it ends
            self._stop_before_training("a stop on another node", self.end_torchrun)

    def _on_signal(self, name: str) -> None:
        self.stop_requested.set()
        if not self.training:
            self._stop_before_training(name)

    def _stop_before_training(self, cause: str, then: Callable[[], object] = lambda: None) -> NoReturn:
        """End this process, because there is nothing to save yet.

        If another rank of this machine has failed, its reason becomes the reason of the job, and this rank reports
        nothing.
        """
        if (failure := launch.failure_of_another()) is not None:
            self.exit_record.write(*failure)
            # This rank ends with status 0, so that torchrun's table of failures lists only the rank that has failed.
            os._exit(EXIT_DONE if launch.environment_nodes() == 1 else failure.status)
        reason = None
        with advisory("heartbeats of the other ranks"):
            reason = None if self._heartbeat is None else self._heartbeat.announce_stop()
        if reason is not None:
            self.exit_record.write(EXIT_ERROR, reason)
            os._exit(EXIT_ERROR)
        self.exit_record.write(EXIT_STOPPED, "stopped", final=self._heartbeat is not None)
        try:
            line = f"{cause} before the first step: nothing is lost; run the same command again"
            launch.tell_torchrun(line, EXIT_STOPPED, "stopped")
            if self.run_lock.file is not None:  # only rank 0 prints it
                show(f"train.py: {line}")
            then()
        finally:
            os._exit(EXIT_STOPPED)


def receive_signals(on_signal: Callable[[str], object]) -> None:
    """From now on, call `on_signal(NAME)` in a thread for each signal. Call this function once, in the main thread."""
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    # Python runs signal handlers only when the main thread leaves C++ code, for example a rendezvous or a collective.
    # This pipe receives the signal immediately.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            number = os.read(received, 1)[0]
            if number in NUMBERS:
                on_signal(signal.Signals(number).name)

    threading.Thread(target=listen, name="signals", daemon=True).start()


def run_then(command: str, run_directory: Path, status: int, *, uploaded: bool) -> None:
    """Run the command of --then on rank 0, unless an upload failed, and print its exit status. Call it on every rank.

    The run lock is held until the command has ended, so that no other job begins on a machine that may be powered off.
    The command runs in its own session and without torchrun's variables, so that it survives when torchrun ends the
    ranks.
    """
    if launch.environment_rank() != 0:
        # Wait for rank 0: torchrun ends all ranks as soon as one of them has ended with a status other than 0.
        while status == EXIT_STOPPED and os.environ.get("GROUP_RANK", "0") == "0" and lock_is_held(run_directory):
            time.sleep(LOCK_POLL_SECONDS)
    elif not uploaded:
        show("--then: NOT RUN: the last checkpoint is not in the bucket")
    else:
        show(f"--then: {redacted_shell(command)}")
        environment = {name: value for name, value in launch.without_launcher().items() if name != NODE_VARIABLE}
        completed = subprocess.run(command, shell=True, env=environment, start_new_session=True, check=False)
        show(f"--then: ended with status {completed.returncode}")
