"""Heartbeat: a sign of life of every rank each second, so that a job that hangs ends and names the rank.

A thread of every rank writes a beat into torchrun's store, over a connection of its own, and watches a few others.
A process that is stopped, swapped out or on a dead machine has no beats: the others end the job. A rank of which only
the main thread hangs has beats, so that the others' collective times out: the beats then tell in which line it hangs.
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

LOST_SECONDS = 60.0  # at most; a thread that only sleeps and beats is never busy for so long
STOPPED_SECONDS = 5.0  # for torchrun to ask this rank to stop, too
STOP_SECONDS = 20.0  # for the thread to end this process, because another rank was asked to stop
STORE_POLLS = 20  # at least, without an answer of the store: a thread that ends this process polls less
TIMED_POLLS = 10  # between two looks of rank 0 at the seconds of all
AGAIN = "run the same command again; the last checkpoint is as it was"
SPEAKER_SECONDS = 2.0  # for one rank to print, and for all to read its news: torchrun ends all ranks after the first


class Heartbeat:
    """This rank's heartbeat, and its watch over the others; without torchrun, none. To be left before the group."""

    def __init__(
        self,
        ranks: Ranks,
        timeout_seconds: int,
        *,
        lost: Callable[[], object],
        stopped: Callable[[], object],
        orphaned: Callable[[], object],
    ):
        """Called: `lost` before this process ends because another rank is gone, `orphaned` once torchrun is gone.

        `stopped`: some seconds after another rank was asked to stop; ends this process.
        """
        self.ranks = ranks
        self.beats = Beats(ranks.world_size)
        self._lost, self._stopped, self._orphaned = lost, stopped, orphaned
        # In polls. Half the timeout at most, so that this speaks before the collective that waits for the lost rank.
        self._patience = int(min(timeout_seconds / 2, LOST_SECONDS) / BEAT_SECONDS)
        self._count = 0  # own beats
        self._stopped_polls = 0  # since another rank was asked to stop
        self._step: int | None = None  # that training is at
        self._seconds = StepSeconds()  # of the steps before
        self._departure: Departure | None = None
        self._error_place: str | None = None  # where this rank's error was raised
        self._ending = threading.Event()  # set when the thread has to end
        self._thread = None
        if torchrun_job() is not None:
            prefix = f"heartbeat/{torchrun_job()}/{ranks.generation}"  # without the beats of an earlier group
            self._exchange = BeatExchange(PrefixStore(prefix, torchrun_store()), ranks.rank, self.beats)
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
            if environment_nodes() > 1:
                threading.Thread(target=self._watch_store, name="store watch", daemon=True).start()

    def begin_step(self, step: int, seconds: StepSeconds) -> None:
        """Put the step that training begins, counted from 1, and the totals of those before into the beats."""
        self._step, self._seconds = step, seconds

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the heartbeat; if a collective has failed, first print where every rank is."""
        from training.supervision.stack_location import place_of_error

        cut_off = collective_failed(error)
        if cut_off and self._thread is not None:
            time.sleep(BEAT_SECONDS)  # until a beat has told why
            if self.beats.departed("asked to stop"):
                self._thread.join(STOP_SECONDS)  # it ends this process
        with advisory("place of an error"):
            self._error_place = None if error is None else place_of_error(trace)
        self._departure = "done" if error is None else "cut off" if cut_off else "failed"
        self._ending.set()
        if self._thread is None:
            return
        self._thread.join((6 if cut_off else 3) * BEAT_SECONDS)  # longer only where torchrun stands still
        if cut_off and not self.beats.departed("failed"):
            self._lost()

    def announce_stop(self) -> Reason | None:
        """Tell the others that this rank was asked to stop; return why the job ends if one has failed or is gone.

        For a rank that ends at once: after one rank's death torchrun asks the others to stop, too. Waits, 3 beats at
        most, for another beat of each of them, or for their last one.
        """
        if self._thread is None:
            return None
        self._departure = self._departure or "asked to stop"
        deadline = time.monotonic() + 3 * BEAT_SECONDS
        ranks = range(self.ranks.world_size)
        with suppress(dist.DistError):  # torchrun is gone
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
        """Beat and watch. Only DistError may end this thread early: a rank without beats is killed, healthy or not."""
        try:
            while not self._ending.is_set():
                with advisory("heartbeat", dist.DistError):
                    self._publish(self._departure)
                    self._watch()
                self._ending.wait(BEAT_SECONDS)
            if self._departure == "cut off":
                with advisory("places of the ranks", dist.DistError):
                    self._publish(None)  # the place of the error, to be printed
                    if self._exchange.first("told"):
                        self._exchange.poll(everyone=True)
                        self._print_places(f"a collective failed on rank {self.ranks.rank}")
                    else:
                        time.sleep(SPEAKER_SECONDS)
            with advisory("heartbeat", dist.DistError):
                self._exchange.poll()  # another rank's last beat may have come since
            self._publish(self._departure)
        except dist.DistError:  # a store that stands still makes its callers wait; this one is gone
            if self._ending.is_set():
                return
            if self.beats.departed("failed", "cut off"):
                time.sleep(self._patience * BEAT_SECONDS)  # enough, unless this rank is stuck
                os._exit(EXIT_ERROR)
            if self.ranks.coordinates:
                _print("torchrun is gone: stopping at the next step")
            self._orphaned()

    def _watch(self) -> None:
        """Read the others' beats; end this process where one is lost, or was asked to stop."""
        timing = self.ranks.coordinates and (self._count - 1) % TIMED_POLLS == 0
        self._exchange.poll(everyone=timing)
        if self.beats.departed("asked to stop"):
            self._stopped_polls += 1
            if self._stopped_polls * BEAT_SECONDS >= STOPPED_SECONDS:
                self._stopped()
        if lost := self.beats.lost(self._patience):
            self._exchange.tell_lost(lost)
            silent = [str(rank) for rank in lost if self.beats.last[rank].departure is None]
            with advisory("places of the ranks", dist.DistError):
                if silent and self._exchange.first("told lost"):  # no other rank has found out before
                    self._print_places(f"no answer of rank {', '.join(silent)}: {AGAIN}")
        if told := self._exchange.lost():
            self._end_without(told)

    def _watch_store(self) -> None:
        """End this process where the first node's store has long not answered: its machine is dead or cut off."""
        patience = max(self._patience, STORE_POLLS)
        seen, silent = 0, 0
        while not self._ending.wait(BEAT_SECONDS):
            silent = silent + 1 if self._count == seen else 0
            seen = self._count
            if silent >= patience:
                if self.ranks.node.rank == 0:
                    address, seconds = os.environ.get("MASTER_ADDR"), silent * BEAT_SECONDS
                    _print(f"no answer of the first node, {address}, for {seconds:.0f} s: {AGAIN}")
                self._lost()
                os._exit(EXIT_ERROR)

    def _publish(self, departure: Departure | None) -> None:
        from training.supervision.stack_location import current_place

        self._count += 1
        beat = Beat(
            count=self._count,
            departure=departure,
            host=socket.gethostname(),
            node=os.environ.get("GROUP_RANK"),
            pid=os.getpid(),
            step=self._step,
            place=self._error_place or current_place(),
            seconds=self._seconds,
        )
        self._exchange.publish(beat)

    def _end_without(self, lost: dict[int, Beat]) -> NoReturn:
        """End this process, and frozen ones of this node: torchrun would wait for them."""
        frozen = [beat for beat in lost.values() if beat.departure is None]
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
        _print(f"{problem}; the ranks at their last heartbeats:")
        show(*[Notice(f"  {line}", Severity.ERROR) for line in self.beats.report()])


def _print(problem: str) -> None:
    show(Notice(f"train.py: {problem}", Severity.ERROR))
