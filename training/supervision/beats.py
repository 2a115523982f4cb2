"""Heartbeats as one rank sees them: the last beats that it read, and which ranks have gone silent.

Ranks exchange beats over torchrun's store, in a ring: each reads few others, however many there are. A rank writes its
own beat and reads those of the next ranks, and one key with the news of all. Before each run of silent ranks, be it a
whole node, there is one in the ring that lives: it notices, reads all beats from then on, and when one has been silent
for too long tells all ranks which are lost. Reasons to leave travel in the news as well.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any, Literal, cast

import attrs

from common.output import advisory
from training.parallel.step_clock import StepSeconds

BEAT_SECONDS = 1.0  # between two beats of a rank, and two polls
SILENT_POLLS = 2  # that need no mention: a poll may fall between two beats
WATCHED = 2  # next ranks in the ring; one is enough, another for the case that ranks freeze one after the other
NEWS = "news"  # key: a line for each departure, but "done", and each finding of lost ranks
LOST_LINE = "lost "

# Why a rank leaves, in its last beats. "cut off": a collective failed, because another rank is gone or stuck.
Departure = Literal["done", "asked to stop", "failed", "cut off"]


@attrs.frozen(kw_only=True)
class Beat:
    count: int  # beats so far
    departure: Departure | None  # None: the rank stays
    host: str
    node: str | None  # torchrun's number: ranks of one node can send each other signals; host names may repeat
    pid: int
    step: int | None  # None: before the first
    place: str  # line of code
    seconds: StepSeconds = attrs.field(factory=StepSeconds)  # of its steps so far


class Beats:
    """Last beats of ranks. Silence is counted in polls, not by the clock: a laptop that sleeps loses nobody."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.last: dict[int, Beat] = {}
        self.departures: set[Departure] = set()  # of all ranks
        self._silent_polls = [0] * world_size
        self._timed: list[StepSeconds] = []  # of all ranks, at the last answer of `rank_seconds`

    def observe(self, rank: int, beat: Beat) -> None:
        """Take a poll's beat: new, or the same as before. After a while without polls silence counts from now on."""
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
        return not self.departures.isdisjoint(departures)

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
            silence = f", silent for {self._silent_polls[rank] * BEAT_SECONDS:.0f} s" if silent else ""
            reason = "" if beat.departure is None else f"{beat.departure} "
            where = f"{'starting up' if beat.step is None else f'at step {beat.step}'} in {beat.place}"
            lines.append(f"rank {rank} ({beat.host}, pid {beat.pid}{silence}): {reason}{where}")
        return lines


class BeatExchange:
    """One rank's view of the store; values read go to `beats`."""

    def __init__(self, store: Any, rank: int, beats: Beats):
        self._store = store  # dist.Store
        self._rank = rank
        self._beats = beats
        world_size = beats.world_size
        self._ring = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._told: Departure | None = None  # own one in the news
        self._lost: set[int] = set()  # by the news
        store.append(NEWS, "")  # reading a missing key would wait for it

    def publish(self, beat: Beat) -> None:
        if beat.departure not in (None, "done", self._told):
            self._told = beat.departure
            self._store.append(NEWS, f"{beat.departure}\n")
        self._store.set(str(self._rank), json.dumps(attrs.asdict(beat)))
        self._beats.observe(self._rank, beat)

    def poll(self, *, everyone: bool = False) -> None:
        """Read the news and the next ranks that are not done; all others, too, where one is silent, or if asked."""
        watched = list(itertools.islice((rank for rank in self._ring if not self._beats.done(rank)), WATCHED))
        self._observe(watched)
        if everyone or self._beats.longest_silence() >= SILENT_POLLS:
            self._observe(rank for rank in self._ring if rank not in watched)

    def tell_lost(self, ranks: list[int]) -> None:
        """Tell all ranks, this one as well, that these are lost."""
        self._lost.update(ranks)
        self._store.append(NEWS, f"{LOST_LINE}{','.join(map(str, ranks))}\n")

    def lost(self) -> dict[int, Beat]:
        """Return the last beats of the ranks that any rank found lost."""
        return self.read(sorted(self._lost))[0] if self._lost else {}

    def first(self, key: str) -> bool:
        """Tell whether this rank is the first to ask this."""
        return int(self._store.add(key, 1)) == 1

    def _observe(self, ranks: Iterable[int]) -> None:
        beats, news = self.read(ranks)
        for rank, beat in beats.items():
            self._beats.observe(rank, beat)
        for line in news:
            if line.startswith(LOST_LINE):
                self._lost.update(map(int, line.removeprefix(LOST_LINE).split(",")))
            else:
                self._beats.departures.add(cast(Departure, line))

    def read(self, ranks: Iterable[int]) -> tuple[dict[int, Beat], list[str]]:
        """Return the last beat of each of these ranks that has begun, and the lines of the news."""
        begun = list(ranks)
        new = [rank for rank in begun if rank not in self._beats.last]
        if new and not self._store.check([str(rank) for rank in new]):
            begun = [rank for rank in begun if rank not in new or self._store.check([str(rank)])]
        *texts, news = self._store.multi_get([*map(str, begun), NEWS])
        values = [json.loads(text) for text in texts]
        beats = [Beat(**value | {"seconds": StepSeconds(**value["seconds"])}) for value in values]
        return dict(zip(begun, beats, strict=True)), news.decode().splitlines()
