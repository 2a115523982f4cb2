"""Heartbeat: a sign of life of every rank each second, so that a job which hangs ends and names the rank.

A thread of every rank writes a beat into torchrun's store, over a connection of its own, and reads those of all others.
A process that is stopped, swapped out or on a dead machine has no beats: the others end the job. A rank of which only
the main thread hangs has beats, so that the others' collective times out: the beats then tell in which line it hangs.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

import attrs
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # missing from its __all__

from common.errors import EXIT_ERROR
from training.launch import restarts, torchrun_job
from training.parallel.process_group import Ranks, torchrun_store
from training.supervision.beats import Beat, Beats, Departure
from training.supervision.exit_record import ERROR, LOST
from training.supervision.stack_location import current_place, place_of_error

BEAT_SECONDS = 1.0
LOST_SECONDS = 60.0  # at most; a thread that only sleeps and beats is never busy for so long
SPEAKER_SECONDS = 2.0  # the others' head start for the one that prints: torchrun ends all ranks after the first


@attrs.frozen
class _Leaving:
    """Why this rank leaves, and the place of the error that it leaves with."""

    departure: Departure
    place: str | None = None


def end_process() -> NoReturn:
    """End this process at once, as an error."""
    os._exit(EXIT_ERROR)


class Heartbeat:
    """This rank's heartbeat, and its watch over the others'. Without torchrun, none. Leave it before the process group.

    `on_lost` is called when this process ends because another rank is gone, `on_orphaned` when torchrun is gone.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_seconds: int,
        *,
        on_lost: Callable[[], object] = lambda: None,
        on_orphaned: Callable[[], object] = end_process,
        beat_seconds: float = BEAT_SECONDS,
    ):
        self.ranks = ranks
        self.beats = Beats(ranks.world_size, beat_seconds)
        self._on_lost, self._on_orphaned = on_lost, on_orphaned
        self._beat_seconds = beat_seconds
        # In polls. Half the timeout at most, so that this speaks before the collective that waits for the lost rank.
        self._patience = int(min(timeout_seconds / 2, LOST_SECONDS) / beat_seconds)
        self._count = 0  # of own beats
        self._step: int | None = None  # that training is at
        self._leaving: _Leaving | None = None
        self._ending = threading.Event()  # set when the thread has to end
        self._thread = None
        if torchrun_job() is not None:
            prefix = f"heartbeat/{torchrun_job()}/{restarts()}"  # beats of an earlier group of ranks have another one
            self._store = PrefixStore(prefix, torchrun_store())
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def begin_step(self, step: int) -> None:
        """Put the step that training begins, counted from 1, into the beats."""
        self._step = step

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the heartbeat; if a collective has failed, first print where every rank is."""
        if error is None:
            self._leave(_Leaving("done"))
        else:
            self._leave(_Leaving("cut off" if _of_collective(error) else "failed", place_of_error(trace)))

    def announce_stop(self) -> str | None:
        """Tell the others that this rank was asked to stop; return the job's outcome if one has failed or is gone.

        For a rank that ends at once: after one rank's death torchrun asks the others to stop, too. Waits, 3 beats at
        most, for signs of life of the others, or for them to say that they were asked.
        """
        if self._thread is None:
            return None
        self._leaving = self._leaving or _Leaving("asked to stop")
        awaited = {str(rank) for rank in range(self.ranks.world_size)} - {str(self.ranks.rank)}
        counts: dict[str, int] = {}
        cut_off = False
        deadline = time.monotonic() + 3 * self._beat_seconds
        try:
            self._publish("asked to stop")
            while awaited and time.monotonic() < deadline:
                for rank in [rank for rank in awaited if self._store.check([rank])]:
                    beat = Beat.from_json(self._store.get(rank))
                    if beat.departure == "failed":
                        return ERROR
                    cut_off = cut_off or beat.departure == "cut off"
                    if beat.departure is not None or beat.count > counts.setdefault(rank, beat.count):
                        awaited.remove(rank)
                time.sleep(self._beat_seconds / 10)
        except dist.DistError:  # torchrun is gone
            return LOST
        return LOST if cut_off or awaited else None

    def _leave(self, leaving: _Leaving) -> None:
        self._leaving = leaving
        self._ending.set()
        if self._thread is None:
            return
        cut_off = leaving.departure == "cut off"
        self._thread.join((6 if cut_off else 3) * self._beat_seconds)  # longer only where torchrun stands still
        if cut_off and not self.beats.departed("failed"):
            self._on_lost()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._publish(None if self._leaving is None else self._leaving.departure)
                self._poll()
                lost = self.beats.lost(self._patience)
                if lost:
                    self._end_without(lost)
                self._ending.wait(self._beat_seconds)
            assert self._leaving is not None
            if self._leaving.departure == "cut off":
                self._publish(None)  # where this rank is
                self._poll()
                self._print_places()
            self._poll()  # another rank's last beat may have come since
            self._publish(self._leaving.departure)
        except dist.DistError:  # a store that stands still makes its callers wait; this one is gone
            if self._ending.is_set():
                return
            if self.beats.departed("failed", "cut off"):
                time.sleep(self._patience * self._beat_seconds)  # enough, unless this rank is stuck
                end_process()
            if self.ranks.coordinates:
                _print("torchrun is gone: stopping at the next step")
            self._on_orphaned()

    def _publish(self, departure: Departure | None) -> None:
        place = None if self._leaving is None else self._leaving.place
        self._count += 1
        beat = Beat(
            count=self._count,
            departure=departure,
            host=socket.gethostname(),
            node=os.environ.get("GROUP_RANK"),
            pid=os.getpid(),
            step=self._step,
            place=place or current_place(),
        )
        self._store.set(str(self.ranks.rank), beat.to_json())

    def _poll(self) -> None:
        ranks = range(self.ranks.world_size)
        begun = [rank for rank in ranks if rank in self.beats.last or self._store.check([str(rank)])]
        for rank, text in zip(begun, self._store.multi_get([str(rank) for rank in begun]), strict=True):
            self.beats.observe(rank, Beat.from_json(text))

    def _end_without(self, lost: list[int]) -> NoReturn:
        """End this process; kill the frozen ones of this node, or torchrun would wait for them.

        Lost ranks that had left with an error have printed it: this rank did not notice, because it is stuck.
        """
        beats, own = self.beats.last, self.beats.last[self.ranks.rank]
        frozen = [rank for rank in lost if beats[rank].departure is None]
        present = [rank for rank, beat in beats.items() if rank not in lost and beat.departure is None]
        try:
            if frozen and self.ranks.rank == min(present):
                _print(
                    f"{'; '.join(self.beats.describe_silence(rank) for rank in frozen)}; rank {self.ranks.rank} is "
                    f"{own.position()}; the last checkpoint is as it was: run the same command again"
                )
            else:
                time.sleep(SPEAKER_SECONDS)
            for beat in (beats[rank] for rank in frozen):
                if beat.node is not None and beat.node == own.node:
                    with suppress(OSError):
                        os.kill(beat.pid, signal.SIGKILL)
            if frozen:
                self._on_lost()
        finally:
            end_process()

    def _print_places(self) -> None:
        """Print where every rank is, on the first rank that gets here; the others give it time."""
        if self._store.add("told", 1) == 1:
            failed = f"a collective failed on rank {self.ranks.rank}; the ranks at their last heartbeats:"
            _print("\n  ".join([failed, *self.beats.report()]))
        else:
            time.sleep(SPEAKER_SECONDS)


def _of_collective(error: BaseException) -> bool:
    """Tell whether a collective raised this, not the code around it. gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _print(problem: str) -> None:
    line = "\n" if sys.stderr.isatty() else ""  # below the progress bar
    print(f"{line}train.py: {problem}", file=sys.stderr, flush=True)
