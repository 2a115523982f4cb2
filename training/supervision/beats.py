"""Heartbeats as one rank sees them: the last beats that it read, and which ranks have gone silent."""

from typing import Literal

import attrs

from common.errors import advisory
from training.parallel.step_clock import StepSeconds

SILENT_POLLS = 2  # that need no mention: a poll may fall between two beats

# Why a rank leaves, in its last beats. "cut off": a collective failed, because another rank is gone or stuck.
Departure = Literal["done", "asked to stop", "failed", "cut off"]


@attrs.frozen(kw_only=True)
class Beat:
    """One heartbeat of a rank."""

    count: int  # beats so far
    departure: Departure | None  # None: the rank stays
    host: str
    node: str | None  # torchrun's number: ranks of one node can send each other signals; host names may repeat
    pid: int
    step: int | None  # None: before the first
    place: str  # line of code
    seconds: StepSeconds = attrs.field(factory=StepSeconds)  # of its steps so far

    def position(self) -> str:
        where = f"{'starting up' if self.step is None else f'at step {self.step}'} in {self.place}"
        return where if self.departure is None else f"{self.departure} {where}"


class Beats:
    """Last beats of ranks. Silence is counted in polls, not by the clock: a laptop that sleeps loses nobody."""

    def __init__(self, world_size: int, poll_seconds: float):
        self.world_size = world_size
        self.last: dict[int, Beat] = {}
        self.departures: set[Departure] = set()  # of all ranks
        self._poll_seconds = poll_seconds
        self._silent_polls = [0] * world_size
        self._timed: list[StepSeconds] = []  # of all ranks, at the last answer of `rank_seconds`

    def observe(self, rank: int, beat: Beat) -> None:
        """Take what a poll found of a rank: a new beat, or the same as before.

        A rank that was not polled for a while counts as silent from now on, if at all.
        """
        before = self.last.get(rank)
        silent = before is not None and beat.count == before.count and beat.departure != "done"
        self._silent_polls[rank] = self._silent_polls[rank] + 1 if silent else 0
        self.last[rank] = beat
        if beat.departure is not None:
            self.departures.add(beat.departure)

    def done(self, rank: int) -> bool:
        return rank in self.last and self.last[rank].departure == "done"

    def longest_silence(self) -> int:
        """Return the polls without a new beat of the rank that has been silent for longest."""
        return max(self._silent_polls)

    def lost(self, patience: int) -> list[int]:
        """Return the silent ranks once one has been silent for `patience` polls; before that, none."""
        if self.longest_silence() < patience:
            return []
        return [rank for rank, polls in enumerate(self._silent_polls) if polls > patience / 2]

    def departed(self, *departures: Departure) -> bool:
        """Tell whether any rank has left for one of these reasons."""
        return not self.departures.isdisjoint(departures)

    def silent_seconds(self, rank: int) -> float:
        return self._silent_polls[rank] * self._poll_seconds

    @advisory("seconds of each rank")
    def rank_seconds(self) -> list[float] | None:
        """Return each rank's own seconds a step since the last call that had them; None until all have taken one."""
        if len(self.last) < self.world_size:
            return None
        totals = [self.last[rank].seconds for rank in range(self.world_size)]
        pairs = list(zip(totals, self._timed or totals, strict=True))
        if any(now.steps == then.steps for now, then in pairs):
            self._timed = self._timed or totals
            return None
        self._timed = totals
        return [(now.own - then.own) / (now.steps - then.steps) for now, then in pairs]

    def report(self) -> list[str]:
        lines = []
        for rank, beat in sorted(self.last.items()):
            silent = self._silent_polls[rank] > SILENT_POLLS and beat.departure is None
            silence = f", silent for {self.silent_seconds(rank):.0f} s" if silent else ""
            lines.append(f"rank {rank} ({beat.host}, pid {beat.pid}{silence}): {beat.position()}")
        return lines
