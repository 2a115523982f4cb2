"""Heartbeats as one rank sees them: the last beats that it has read, and which ranks have gone silent.

Ranks exchange beats over torchrun's store. They form a ring, in which each rank reads the beats of only a few other
ranks, no matter how many ranks there are. A rank writes its beat, reads the beats of the next ranks in the ring, and
reads one key that has the news of all ranks. Even if several ranks in a row are silent, such as all ranks of a node,
the rank before them in the ring is alive. That rank notices the silence and reads all beats from then on. When one of
the silent ranks has been silent for too long, the watching rank announces to all ranks which ranks are lost. The news
also contains the reasons why ranks leave.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any, Literal, cast

import attrs

from common.output import advisory
from training.parallel.step_clock import StepSeconds

BEAT_SECONDS = 1.0  # between two beats of a rank, and between two polls
SILENT_POLLS = 2  # up to this many silent polls are not reported, because a poll may fall between two beats
WATCHED = 2  # each rank watches this many of the ranks after it; more than one, because a watching rank may freeze
NEWS = "news"  # key of the store: one line per departure (except "done") and per discovery of lost ranks
LOST_LINE = "lost "

# Why a rank leaves, according to its last beats. "cut off": a collective failed because another rank died or is stuck.
Departure = Literal["done", "asked to stop", "failed", "cut off"]


@attrs.frozen(kw_only=True)
class Beat:
    count: int  # number of beats so far
    departure: Departure | None  # None: the rank stays
    host: str
    # The number that torchrun gave the node. Only ranks on the same node can send each other signals. Host names do not
    # identify a node, because they may not be unique.
    node: str | None
    pid: int
    step: int | None  # None: before the first step
    code_line: str  # the line of code that the rank executes
    seconds: StepSeconds = attrs.field(factory=StepSeconds)  # totals of the rank's steps so far


class Beats:
    """The last beats of ranks.

    Silence is counted in polls instead of seconds. Otherwise all ranks would count as lost when a laptop wakes up.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.last: dict[int, Beat] = {}
        self.departures: set[Departure] = set()  # of all ranks
        self._silent_polls = [0] * world_size
        self._timed: list[StepSeconds] = []  # totals of all ranks when `rank_seconds` last returned numbers

    def observe(self, rank: int, beat: Beat) -> None:
        """Record the beat that a poll has read. It may be a new beat, or the same one as at the last poll.

        A new beat resets the count of silent polls, even after a pause in polling.
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
        """Return the longest silence of any rank, in polls."""
        return max(self._silent_polls)

    def lost(self, patience: int) -> list[int]:
        """Return the ranks that count as lost.

        Once a rank has been silent for `patience` polls, all ranks that have been silent for more than half that time
        are lost. Until then, the list is empty.
        """
        if self.longest_silence() < patience:
            return []
        return [rank for rank, polls in enumerate(self._silent_polls) if polls > patience / 2]

    def departed(self, *departures: Departure) -> bool:
        return not self.departures.isdisjoint(departures)

    @advisory("seconds of each rank")
    def rank_seconds(self) -> list[float] | None:
        """Return each rank's own seconds per step since the last call that returned numbers.

        Returns None until every rank has taken a step since that call.
        """
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
        """For each rank, return a line that says where the rank was at its last beat."""
        lines = []
        for rank, beat in sorted(self.last.items()):
            silent = self._silent_polls[rank] > SILENT_POLLS and beat.departure is None
            silence = f", silent for {self._silent_polls[rank] * BEAT_SECONDS:.0f} s" if silent else ""
            reason = "" if beat.departure is None else f"{beat.departure} "
            where = f"{'starting up' if beat.step is None else f'at step {beat.step}'} in {beat.code_line}"
            lines.append(f"rank {rank} ({beat.host}, pid {beat.pid}{silence}): {reason}{where}")
        return lines


class BeatExchange:
    """One rank's view of the store. The beats that it reads are recorded in `beats`."""

    def __init__(self, store: Any, rank: int, beats: Beats):
        self._store = store  # dist.Store
        self._rank = rank
        self._beats = beats
        world_size = beats.world_size
        self._ring = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._announced: Departure | None = None  # this rank's departure, as written into `NEWS`
        self._lost: set[int] = set()  # according to the news
        store.append(NEWS, "")  # creates the key, because a read of a missing key would wait

    def publish(self, beat: Beat) -> None:
        """Write this rank's beat into the store. A new departure, except "done", is also added to the key `NEWS`."""
        if beat.departure not in (None, "done", self._announced):
            self._announced = beat.departure
            self._store.append(NEWS, f"{beat.departure}\n")
        self._store.set(str(self._rank), json.dumps(attrs.asdict(beat)))
        self._beats.observe(self._rank, beat)

    def poll(self, *, all_ranks: bool = False) -> None:
        """Read the news, and the beats of the next unfinished ranks in the ring.

        The beats of all other ranks are read as well if a watched rank is silent, or if `all_ranks` is true.
        """
        watched = list(itertools.islice((rank for rank in self._ring if not self._beats.done(rank)), WATCHED))
        self._observe(watched)
        if all_ranks or self._beats.longest_silence() >= SILENT_POLLS:
            self._observe(rank for rank in self._ring if rank not in watched)

    def announce_lost(self, ranks: list[int]) -> None:
        """Tell all ranks, including this one, that these ranks are lost."""
        self._lost.update(ranks)
        self._store.append(NEWS, f"{LOST_LINE}{','.join(map(str, ranks))}\n")

    def lost(self) -> dict[int, Beat]:
        """Return the last beats of the ranks that some rank has announced as lost."""
        return self.read(sorted(self._lost))[0] if self._lost else {}

    def is_first(self, key: str) -> bool:
        """Return whether this rank is the first one that calls this method with the key."""
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
        """Return the last beat of each of these ranks that has one, and the lines of the news."""
        readable = list(ranks)
        new = [rank for rank in readable if rank not in self._beats.last]
        if new and not self._store.check([str(rank) for rank in new]):
            readable = [rank for rank in readable if rank not in new or self._store.check([str(rank)])]
        *texts, news = self._store.multi_get([*map(str, readable), NEWS])
        fields = [json.loads(text) for text in texts]
        beats = [Beat(**beat_fields | {"seconds": StepSeconds(**beat_fields["seconds"])}) for beat_fields in fields]
        return dict(zip(readable, beats, strict=True)), news.decode().splitlines()
