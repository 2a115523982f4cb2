"""Heartbeat: every rank gives a sign of life each second. A job that hangs can then end and name the rank at fault.

A thread in every rank writes beats into torchrun's store, over a separate connection, and watches a few other ranks. A
process that is stopped, swapped out or on a dead machine writes no beats, and the other ranks end the job. A rank whose
main thread hangs still writes beats. In that case, a collective of the other ranks times out, and the beats show the
line in which the rank hangs.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore

from common.errors import EXIT_ERROR, Reason
from common.launch import environment_nodes, torchrun_job
from common.output import Notice, Severity, advisory, show
from training.parallel.process_group import Ranks, collective_failed, torchrun_store
from training.parallel.step_clock import StepSeconds
from training.supervision.beats import BEAT_SECONDS, Beat, BeatExchange, Beats, Departure

LOST_SECONDS = 60.0  # a healthy rank is never silent for this long, because its thread only sleeps and sends beats
STOPPED_SECONDS = 5.0  # time for torchrun to ask this rank to stop as well
STOP_SECONDS = 20.0  # time for the thread to end this process after another rank was asked to stop
# A process ends if the store has not answered for at least this many polls in a row. As long as the store answers,
# `_run` never skips that many polls.
STORE_POLLS = 20
TIMED_POLLS = 10  # rank 0 reads the step times of all ranks once in this many polls
CONTINUE_ADVICE = "run the same command again to continue from the last checkpoint"
SPEAKER_SECONDS = 2.0  # time for one rank to print, and for all ranks to read its news, before torchrun ends them


class Heartbeat:
    """This rank's heartbeat, and its watch over the other ranks. It does nothing without torchrun.

    Leave this context before leaving the process group.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_seconds: int,
        *,
        lost: Callable[[], object],
        stopped: Callable[[], object],
        orphaned: Callable[[], object],
    ):
        """Start the heartbeat. `lost`, `stopped` and `orphaned` are called in its thread.

        `lost` is called when another rank has died; this process ends after the call. `stopped` is called a few seconds
        after another rank was asked to stop, and ends this process. `orphaned` is called when torchrun has ended.
        """
        self.ranks = ranks
        self.beats = Beats(ranks.world_size)
        self._lost, self._stopped, self._orphaned = lost, stopped, orphaned
        # The patience, in polls, is at most half the timeout of collectives. A lost rank is therefore reported before
        # a collective that waits for it times out.
        self._patience = int(min(timeout_seconds / 2, LOST_SECONDS) / BEAT_SECONDS)
        self._count = 0  # beats of this rank so far
        self._stopped_polls = 0  # polls since another rank was asked to stop
        self._step: int | None = None  # the step that is being trained
        self._seconds = StepSeconds()  # totals of the earlier steps
        self._departure: Departure | None = None
        self._error_line: str | None = None  # line of code that raised this rank's error
        self._ending = threading.Event()  # set when both threads have to end
        self._thread = None
        if torchrun_job() is not None:
            prefix = f"heartbeat/{torchrun_job()}/{ranks.generation}"  # hides the beats of earlier groups of ranks
            self._exchange = BeatExchange(PrefixStore(prefix, torchrun_store()), ranks.rank, self.beats)
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
            if environment_nodes() > 1:
                threading.Thread(target=self._watch_store, name="store watch", daemon=True).start()

    def begin_step(self, step: int, seconds: StepSeconds) -> None:
        """Set the number of the step that now begins (the first is 1), and the totals of the steps before it."""
        self._step, self._seconds = step, seconds

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the heartbeat. If a collective has failed, first print where every rank is."""
        from training.supervision.stack_location import line_of_error

        cut_off = collective_failed(error)
        if cut_off and self._thread is not None:
            time.sleep(BEAT_SECONDS)  # meanwhile, another rank's beat may show why the collective failed
            if self.beats.departed("asked to stop"):
                self._thread.join(STOP_SECONDS)  # the thread ends this process
        with advisory("place of an error"):
            self._error_line = None if error is None else line_of_error(trace)
        self._departure = "done" if error is None else "cut off" if cut_off else "failed"
        self._ending.set()
        if self._thread is None:
            return
        self._thread.join((6 if cut_off else 3) * BEAT_SECONDS)  # enough, unless torchrun does not respond
        if cut_off and not self.beats.departed("failed"):
            self._lost()

    def announce_stop(self) -> Reason | None:
        """Announce that this rank was asked to stop. If another rank has failed or died, return why the job ends.

        A rank that is about to end calls this, because torchrun also asks ranks to stop after one of them has died.
        Waits until every other rank has published its next beat or its last one. The wait lasts at most 3 beats.
        """
        if self._thread is None:
            return None
        self._departure = self._departure or "asked to stop"
        deadline = time.monotonic() + 3 * BEAT_SECONDS
        ranks = range(self.ranks.world_size)
        with suppress(dist.DistError):  # torchrun has ended
            self._publish(self._departure)
            before, _ = self._exchange.read(ranks)
            while time.monotonic() < deadline:
                beats, _ = self._exchange.read(ranks)
                departures = [beat.departure for beat in beats.values()]
                if "failed" in departures:
                    return "failed-rank"
                counts = {rank: before[rank].count if rank in before else 0 for rank in beats}
                alive = [beat.departure is not None or beat.count > counts[rank] for rank, beat in beats.items()]
                if sum(alive) == self.ranks.world_size:
                    return "lost-rank" if "cut off" in departures else None
                time.sleep(BEAT_SECONDS / 10)
        return "lost-rank"

    def _run(self) -> None:
        """Publish beats and watch the other ranks.

        Only a DistError may end this thread early, because a rank without beats is killed even if it is healthy.
        """
        try:
            while not self._ending.is_set():
                with advisory("heartbeat", dist.DistError):
                    self._publish(self._departure)
                    self._watch()
                self._ending.wait(BEAT_SECONDS)
            if self._departure == "cut off":
                with advisory("places of the ranks", dist.DistError):
                    self._publish(None)  # this beat has the line of code that failed; `_print_places` prints it
                    if self._exchange.is_first("told"):
                        self._exchange.poll(all_ranks=True)
                        self._print_places(f"a collective failed on rank {self.ranks.rank}")
                    else:
                        time.sleep(SPEAKER_SECONDS)
            with advisory("heartbeat", dist.DistError):
                self._exchange.poll()  # another rank may have published its last beat in the meantime
            self._publish(self._departure)
        except dist.DistError:  # the store has ended; a store that only hangs makes its callers wait instead
            if self._ending.is_set():
                return
            self._ending.set()  # so that `_watch_store` lets this process finish the save of a checkpoint
            if self.beats.departed("failed", "cut off"):
                time.sleep(self._patience * BEAT_SECONDS)  # time for this rank to end, unless it is stuck
                os._exit(EXIT_ERROR)
            if self.ranks.coordinates:
                _print("torchrun has ended; stopping at the next step")
            self._orphaned()

    def _watch(self) -> None:
        """Read the beats of other ranks; end this process if one of them is lost or was asked to stop."""
        timing = self.ranks.coordinates and (self._count - 1) % TIMED_POLLS == 0
        self._exchange.poll(all_ranks=timing)
        if self.beats.departed("asked to stop"):
            self._stopped_polls += 1
            if self._stopped_polls * BEAT_SECONDS >= STOPPED_SECONDS:
                self._stopped()
        if lost_ranks := self.beats.lost(self._patience):
            self._exchange.announce_lost(lost_ranks)
            silent = [str(rank) for rank in lost_ranks if self.beats.last[rank].departure is None]
            with advisory("places of the ranks", dist.DistError):
                if silent and self._exchange.is_first("told lost"):  # only the first rank that notices prints this
                    self._print_places(f"no answer from rank {', '.join(silent)}; {CONTINUE_ADVICE}")
        if lost_beats := self._exchange.lost():
            self._end_because_lost(lost_beats)

    def _watch_store(self) -> None:
        """End this process if the store does not answer for a long time.

        The store runs on the first node. A long silence means that the first node is dead, or cut off from this one.
        """
        patience = max(self._patience, STORE_POLLS)
        last_count, silent_polls = 0, 0
        while not self._ending.wait(BEAT_SECONDS):
            silent_polls = silent_polls + 1 if self._count == last_count else 0
            last_count = self._count
            if silent_polls >= patience:
                if self.ranks.node.rank == 0:
                    address, seconds = os.environ.get("MASTER_ADDR"), silent_polls * BEAT_SECONDS
                    _print(f"no answer from the first node, {address}, for {seconds:.0f} s; {CONTINUE_ADVICE}")
                self._lost()
                os._exit(EXIT_ERROR)

    def _publish(self, departure: Departure | None) -> None:
        from training.supervision.stack_location import current_line

        self._count += 1
        beat = Beat(
            count=self._count,
            departure=departure,
            host=socket.gethostname(),
            node=os.environ.get("GROUP_RANK"),
            pid=os.getpid(),
            step=self._step,
            code_line=self._error_line or current_line(),
            seconds=self._seconds,
        )
        self._exchange.publish(beat)

    def _end_because_lost(self, lost_beats: dict[int, Beat]) -> NoReturn:
        """End this process. Also end the frozen processes of this node, because torchrun would wait for them."""
        frozen = [beat for beat in lost_beats.values() if beat.departure is None]
        try:
            time.sleep(SPEAKER_SECONDS)
            for beat in frozen:
                if beat.node is not None and beat.node == os.environ.get("GROUP_RANK"):
                    with suppress(OSError):
                        os.kill(beat.pid, signal.SIGKILL)
            if frozen:
                self._lost()
        finally:
            os._exit(EXIT_ERROR)

    def _print_places(self, problem: str) -> None:
        _print(f"{problem}. Where each rank was at its last heartbeat:")
        show(*[Notice(f"  {line}", Severity.ERROR) for line in self.beats.report()])


def _print(problem: str) -> None:
    show(Notice(f"train.py: {problem}", Severity.ERROR))
