"""Supervision of a training process: requests to stop, loss of a rank, run lock, exit record, exit status.

Phases: start (before torch is imported, until the ranks have met), preparation (until there is something to save),
training. A request to stop may come on any rank: a signal, a stop of another node, torchrun's end, a used-up budget.

In training it is noted: before each step and inside a validation all ranks agree (stop_request.py), and one
rank's request makes all of them save and end as "stopped". Before, it ends this process at once, in preparation after
the others' heartbeats (3 s) have told whether one is "lost" or in "error". A signal may be torchrun's own, sent to the
others after one rank's death. If that rank has written its reason, the others end with that reason and without a word;
otherwise a rank in start cannot tell, so its "stopped" is not final, and a group of ranks that torchrun restarts goes
on. torchrun's own end is "lost" in start, status 1 without a record in preparation.

After a final "stopped" or "diverged" the ranks end torchrun of several nodes, which would restart them
(`end_torchrun`); a group that it restarts nevertheless ends again at once. On another number of nodes it goes on:
torchrun also asks ranks to stop because a node has come.

Loss of a rank; nothing is saved. A process that dies: torchrun ends the others, by SIGTERM. One that freezes or hangs:
the others end as "lost" (heartbeat.py).

Rank 0 of a command that trains holds `.lock` from start until the process is dead, and writes `exit.json` at the end:
run_lock.py. Outcomes and their causes: docs/checkpoints.md.
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

# A cloud's notice, Ctrl-C, a batch system's notice, a closed terminal.
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TORCHRUN_SECONDS = 5.0  # for torchrun to ask its ranks to stop, once another node's has
FAILURE_SECONDS = 2.0  # for another rank of this machine to tell why it ends, once it has failed
FIRST_RANK_SECONDS = 120.0  # for the first rank of a node to end, which draws the chart


class Supervision:
    """Supervision of this process; one object a process. Needs no torch until the ranks meet."""

    def __init__(self) -> None:
        """Receive signals from now on."""
        self.stop_requested = threading.Event()
        self.earlier_exit: JobExit | None = None  # final one of an earlier group of this job: end with it again
        self.run_lock, self.exit_record = RunLock(), ExitRecord(None)
        self._own_disk_lock = RunLock()  # on the first rank of another node than rank 0's
        self._heartbeat: Heartbeat | None = None  # since the ranks have met
        self.training = False  # from then on, requests to stop are only noted
        receive_signals(self._on_signal)

    def lock(self, run_directory: Path) -> None:
        """Lock a run directory, once. Raises BadInput when another job has locked it."""
        if self.run_lock.file is not None:
            return
        self.run_lock = take_run_lock(run_directory)
        self.earlier_exit = final_exit(run_directory) if self.run_lock.restarted else None
        if self.earlier_exit is None:
            self.exit_record = ExitRecord(run_directory)

    def join(self, device: str | None, timeout_seconds: int, tensor_parallel: int = 1) -> "Heartbeat":
        """Meet the other ranks; return this rank's heartbeat. Raises BadInput, on this rank alone, without torchrun."""
        import torch.distributed as dist

        from training.parallel.process_group import gather, rendezvous_error, start
        from training.supervision.heartbeat import Heartbeat

        try:
            ranks = start(device, timeout_seconds, tensor_parallel)
            self.run_lock.write_job({name for name in gather(ranks, launch.torchrun_identity()) if name is not None})
            lost, stopped, orphaned = self._end_as_lost, self._on_others_stopped, self._on_orphaned
            self._heartbeat = Heartbeat(ranks, timeout_seconds, lost=lost, stopped=stopped, orphaned=orphaned)
        except dist.DistError as error:
            self._end_as_lost()
            raise rendezvous_error() from error
        return self._heartbeat

    def lock_own_disk(self, run_directory: Path) -> None:
        """Lock a run directory that other nodes do not share. Raises BadInput when another job has locked it."""
        if self.run_lock.file is None:
            self._own_disk_lock = take_run_lock(run_directory)

    def end_torchrun(self) -> None:
        """On several nodes, end this one's torchrun where it would restart ranks that have all stopped or diverged.

        Not where it has asked them to stop: it then ends by itself, or another node has come and they shall go on. The
        torchruns of other nodes need not have been asked; left alone, they would wait for this one.
        """
        torchrun = launch.torchrun_process()
        last = launch.restarts() >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if torchrun is None or last or launch.environment_nodes() == 1 or self.stop_requested.wait(TORCHRUN_SECONDS):
            return
        # torchrun tells all once it has heard; were a rank to end before, it would restart them
        if not launch.is_first_on_machine():
            self.stop_requested.wait(FIRST_RANK_SECONDS)
        elif launch.torchrun_process() == torchrun:
            with suppress(ProcessLookupError):
                os.kill(torchrun, signal.SIGTERM)
            self.stop_requested.wait(TORCHRUN_SECONDS)

    def failure_behind(self, error: Exception) -> launch.Failure | None:
        """Return why another rank has ended if this rank's error is that of a collective with it; otherwise None."""
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
        return failure or launch.Failure(EXIT_ERROR, "failed-rank", "another rank has failed: see its output")

    def _end_as_lost(self) -> None:
        self.exit_record.write(EXIT_ERROR, "lost-rank")

    def _on_orphaned(self) -> None:
        if not self.training:
            os._exit(EXIT_ERROR)
        self.stop_requested.set()

    def _on_others_stopped(self) -> None:
        if not (self.training or self.stop_requested.is_set()):  # else torchrun has asked this node's, too
            self.training = True  # torchrun's signal, when it ends, changes nothing
            self._stop_before_training("a stop on another node", self.end_torchrun)

    def _on_signal(self, name: str) -> None:
        self.stop_requested.set()
        if not self.training:
            self._stop_before_training(name)

    def _stop_before_training(self, cause: str, then: Callable[[], object] = lambda: None) -> NoReturn:
        """End this process, as nothing can be saved yet.

        If another rank of this machine has failed, its reason is the job's, and this rank adds none of its own.
        """
        if (failure := launch.failure_of_another()) is not None:
            self.exit_record.write(*failure)
            # torchrun's table has that rank alone
            os._exit(EXIT_DONE if launch.environment_nodes() == 1 else failure.status)
        reason = None
        with advisory("heartbeats of the other ranks"):
            reason = None if self._heartbeat is None else self._heartbeat.announce_stop()
        if reason is not None:
            self.exit_record.write(EXIT_ERROR, reason)
            os._exit(EXIT_ERROR)
        self.exit_record.write(EXIT_STOPPED, "stopped", final=self._heartbeat is not None)
        try:
            line = f"{cause} before the first step: nothing is lost; the same command continues"
            launch.tell_torchrun(line, EXIT_STOPPED, "stopped")
            if self.run_lock.file is not None:  # rank 0 speaks for all
                show(f"train.py: {line}")
            then()
        finally:
            os._exit(EXIT_STOPPED)


def receive_signals(on_signal: Callable[[str], object]) -> None:
    """Call `on_signal` with the name of each signal from now on, in a thread. Call it once, in the main thread."""
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    # Python's own handlers wait while the main thread is in C++, as in a rendezvous or collective; this pipe does not.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            number = os.read(received, 1)[0]
            if number in NUMBERS:
                on_signal(signal.Signals(number).name)

    threading.Thread(target=listen, name="signals", daemon=True).start()


def run_then(command: str, run_directory: Path, status: int, *, uploaded: bool) -> None:
    """Run the command of --then on rank 0, unless an upload failed, and print its exit status; call it on every rank.

    The run lock is held until it has ended: no other job begins what it might power off. It runs in a session of its
    own, without torchrun's variables, and so outlives a torchrun that ends its ranks.
    """
    if launch.environment_rank() != 0:
        # torchrun ends all ranks once one has ended with another status than 0.
        while status == EXIT_STOPPED and os.environ.get("GROUP_RANK", "0") == "0" and lock_is_held(run_directory):
            time.sleep(LOCK_POLL_SECONDS)
    elif not uploaded:
        show("--then: NOT RUN: the bucket lacks the last checkpoint")
    else:
        show(f"--then: {redacted_shell(command)}")
        environment = {name: value for name, value in launch.without_launcher().items() if name != NODE_VARIABLE}
        ended = subprocess.run(command, shell=True, env=environment, start_new_session=True, check=False).returncode
        show(f"--then: ended with status {ended}")
