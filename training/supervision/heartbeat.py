"""Who of the ranks still answers, and where each one stands: so that a job that hangs ends, and says why.

A thread of every rank puts a beat a second into torchrun's store, over a connection of its own, and reads those of all
others. A process that stands still (stopped, swapped out, its machine gone) has no beats: the others end the job. A
rank whose main thread alone is stuck has beats, so the others' collective times out: the beats say where it is.
"""

import json
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
from training.parallel.process_group import Ranks, torchrun_store
from training.supervision.run_lock import ERROR, LOST
from training.supervision.stack_location import current_place, place_of_error

BEAT_SECONDS = 1.0
LOST_SECONDS = 60.0  # at most; a thread that only sleeps and beats is never busy for so long
SPEAKER_SECONDS = 2.0  # the others' head start for the one that speaks: torchrun ends all ranks after the first


@attrs.frozen(kw_only=True)
class Beat:
    """A rank's sign of life."""

    count: int  # beats so far
    left: str | None  # its last beat: "done", "asked" to stop, "failed", or "alone": failed because another one is gone
    host: str
    node: str | None  # of torchrun's: ranks of one node can send each other signals; host names may repeat
    pid: int
    step: int | None  # None: before the first
    place: str

    def standing(self) -> str:
        """Return where the rank was."""
        where = f"{'starting up' if self.step is None else f'at step {self.step}'} in {self.place}"
        return where if self.left is None else f"{self.left} {where}"


class Watch:
    """This rank's beats, and its eyes on the others'; without torchrun, nothing. Leave it before the process group."""

    def __init__(self, ranks: Ranks, timeout_seconds: int):
        self.step: int | None = None  # being worked on; set by the training thread
        self.on_orphaned: Callable[[], object] = _leave  # called when torchrun is gone; before the loop: end
        self.on_lost: Callable[[], object] = lambda: None  # called when this job ends because a rank is gone
        self.ranks = ranks
        # In own polls, not by the clock: when a whole machine sleeps and wakes up, nobody has missed a beat. Half the
        # timeout at most, so that this speaks before the collective that waits for the lost rank gives up.
        self._patience = int(min(timeout_seconds / 2, LOST_SECONDS) / BEAT_SECONDS)
        self._count = 0  # own beats
        self._beats: dict[int, Beat] = {}
        self._silent_polls = [0] * ranks.world_size
        self._failed_in: str | None = None  # place of the error that ends this rank
        self._alone = False  # that error is a collective's: the others' places explain it
        self._asked = False  # to stop, before the first step: this rank is about to end
        self._told = threading.Event()  # by this rank or by another one
        self._wake = threading.Event()
        self._closing = False
        self._thread = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            start = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
            self._store = PrefixStore(
                "/".join(["watch", *start]), torchrun_store()
            )  # not a restarted job's earlier beats
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop watching; if a collective has failed, say first where every rank is."""
        if error is not None:
            self._failed_in = place_of_error(trace)
            if self._thread is not None and _of_collective(error):
                self._alone = True
                self._wake.set()
                self._told.wait(3 * BEAT_SECONDS)  # the store may be gone, too
        self.close()
        if self._alone and all(beat.left != "failed" for beat in self._beats.values()):
            self.on_lost()

    def close(self) -> None:
        """Tell the others that this rank leaves, and end the thread."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(3 * BEAT_SECONDS)  # longer only where torchrun stands still

    def explain_stop(self) -> str | None:
        """Tell the others that this rank was asked to stop; return the job's outcome if one has failed or is gone.

        For a rank that ends at once: torchrun asks the living to stop, too. Waits, 3 beats at most, for the others'
        signs of life, or for them to say that they were asked.
        """
        if self._thread is None:
            return None
        self._asked = True
        others = {str(rank) for rank in range(self.ranks.world_size)} - {str(self.ranks.rank)}
        counts: dict[str, int] = {}
        gone = False
        deadline = time.monotonic() + 3 * BEAT_SECONDS
        try:
            self._publish()
            while others and time.monotonic() < deadline:
                for key in [key for key in others if self._store.check([key])]:
                    beat = Beat(**json.loads(self._store.get(key)))
                    if beat.left == "failed":
                        return ERROR
                    gone = gone or beat.left == "alone"
                    if beat.left is not None or beat.count > counts.setdefault(key, beat.count):
                        others.remove(key)
                time.sleep(BEAT_SECONDS / 10)
        except dist.DistError:  # torchrun is gone
            return LOST
        return LOST if gone or others else None

    def report(self) -> list[str]:
        """Return where each rank stands, a line each, as of the last beats."""
        lines = []
        for rank, beat in sorted(self._beats.items()):
            silence = self._silent_polls[rank] * BEAT_SECONDS
            silent = f", silent for {silence:.0f} s" if silence > 2 * BEAT_SECONDS and beat.left is None else ""
            lines.append(f"rank {rank} ({beat.host}, pid {beat.pid}{silent}): {beat.standing()}")
        return lines

    def _run(self) -> None:
        try:
            while not self._closing:
                self._publish()
                self._read()
                if max(self._silent_polls) >= self._patience:
                    self._end_without([n for n, polls in enumerate(self._silent_polls) if polls > self._patience / 2])
                if self._alone and not self._told.is_set():
                    self._tell()
                self._wake.wait(BEAT_SECONDS)
                self._wake.clear()
            self._read()  # another rank's last word may have come since
            self._publish("done" if self._failed_in is None else "alone" if self._alone else "failed")
        except dist.DistError:  # a store that stands still makes its callers wait; this one is gone
            if self._closing:
                return
            if any(beat.left in ("failed", "alone") for beat in self._beats.values()):
                time.sleep(self._patience * BEAT_SECONDS)  # enough, unless this rank is stuck
                _leave()
            if self.ranks.coordinates:
                _say("torchrun is gone: stopping at the next step")
            self.on_orphaned()

    def _publish(self, left: str | None = None) -> None:
        where = self._failed_in or _place()
        self._count += 1
        beat = Beat(
            count=self._count,
            left=left or ("asked" if self._asked else None),
            host=socket.gethostname(),
            node=os.environ.get("GROUP_RANK"),
            pid=os.getpid(),
            step=self.step,
            place=where,
        )
        self._store.set(str(self.ranks.rank), json.dumps(attrs.asdict(beat)))

    def _read(self) -> None:
        ranks = range(self.ranks.world_size)
        begun = [rank for rank in ranks if rank in self._beats or self._store.check([str(rank)])]
        for rank, text in zip(begun, self._store.multi_get([str(rank) for rank in begun]), strict=True):
            beat, before = Beat(**json.loads(text)), self._beats.get(rank)
            missed = before is not None and beat.count == before.count and beat.left != "done"
            self._silent_polls[rank] = self._silent_polls[rank] + 1 if missed else 0
            self._beats[rank] = beat

    def _end_without(self, lost: list[int]) -> NoReturn:
        """End this process; kill the frozen ones of this node, or torchrun would wait for them.

        Of ranks that have failed, the errors are told already: this one did not notice, because it is stuck.
        """
        own = self._beats[self.ranks.rank]
        frozen = [rank for rank in lost if self._beats[rank].left is None]
        present = [rank for rank, beat in self._beats.items() if rank not in lost and beat.left is None]
        try:
            if frozen and self.ranks.rank == min(present):
                _say(
                    f"{'; '.join(self._silence(rank) for rank in frozen)}; rank {self.ranks.rank} is "
                    f"{own.standing()}; the last checkpoint is as it was: run the same command again"
                )
            else:
                time.sleep(SPEAKER_SECONDS)
            for beat in (self._beats[rank] for rank in frozen):
                if beat.node is not None and beat.node == own.node:
                    with suppress(OSError):
                        os.kill(beat.pid, signal.SIGKILL)
            if frozen:
                self.on_lost()
        finally:
            _leave()

    def _silence(self, rank: int) -> str:
        beat, seconds = self._beats[rank], self._silent_polls[rank] * BEAT_SECONDS
        return (
            f"rank {rank} ({beat.host}, pid {beat.pid}) has not answered for {seconds:.0f} s, "
            f"last seen {beat.standing()}"
        )

    def _tell(self) -> None:
        if self._store.add("told", 1) == 1:  # the first rank of all
            failed = f"a collective failed on rank {self.ranks.rank}; the ranks at their last signs of life:"
            _say("\n  ".join([failed, *self.report()]))
        else:
            time.sleep(SPEAKER_SECONDS)
        self._told.set()


def _place() -> str:
    try:
        return current_place()
    except Exception as error:  # noqa: BLE001  # other threads' frames are foreign ground, and the beats must go on
        return f"code that cannot be told ({type(error).__name__})"


def _of_collective(error: BaseException) -> bool:
    """Tell whether a collective raised this, not the code around it. gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _leave() -> NoReturn:
    os._exit(EXIT_ERROR)


def _say(problem: str) -> None:
    line = "\n" if sys.stderr.isatty() else ""  # below the progress bar
    print(f"{line}train.py: {problem}", file=sys.stderr, flush=True)
