"""Exchange of heartbeats over torchrun's store, in a ring: each rank reads few others, however many there are.

A rank writes its own beat and reads those of the next ranks, and one key with the news of all. Before each run of
silent ranks, be it a whole node, there is one in the ring that lives: it notices, reads all beats from then on, and
when one has been silent for too long tells all ranks which are lost. Reasons to leave travel in the news as well.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any, cast

import attrs

from training.parallel.step_clock import StepSeconds
from training.supervision.beats import SILENT_POLLS, Beat, Beats, Departure

WATCHED = 2  # next ranks in the ring; one is enough, another for the case that ranks freeze one after the other
NEWS = "news"  # key: a line for each departure, but "done", and each finding of lost ranks
LOST_LINE = "lost "


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

    def read(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """Return the last beat of each of these ranks that has begun."""
        return self._read(ranks)[0]

    def tell_lost(self, ranks: list[int]) -> None:
        """Tell all ranks, this one as well, that these are lost."""
        self._lost.update(ranks)
        self._store.append(NEWS, f"{LOST_LINE}{','.join(map(str, ranks))}\n")

    def lost(self) -> dict[int, Beat]:
        """Return the last beats of the ranks that any rank found lost."""
        return self.read(sorted(self._lost)) if self._lost else {}

    def first(self, key: str) -> bool:
        """Tell whether this rank is the first to ask this."""
        return int(self._store.add(key, 1)) == 1

    def _observe(self, ranks: Iterable[int]) -> None:
        beats, news = self._read(ranks)
        for rank, beat in beats.items():
            self._beats.observe(rank, beat)
        for line in news:
            if line.startswith(LOST_LINE):
                self._lost.update(map(int, line.removeprefix(LOST_LINE).split(",")))
            else:
                self._beats.departures.add(cast(Departure, line))

    def _read(self, ranks: Iterable[int]) -> tuple[dict[int, Beat], list[str]]:
        begun = list(ranks)
        new = [rank for rank in begun if rank not in self._beats.last]
        if new and not self._store.check([str(rank) for rank in new]):
            begun = [rank for rank in begun if rank not in new or self._store.check([str(rank)])]
        *texts, news = self._store.multi_get([*map(str, begun), NEWS])
        values = [json.loads(text) for text in texts]
        beats = [Beat(**value | {"seconds": StepSeconds(**value["seconds"])}) for value in values]
        return dict(zip(begun, beats, strict=True)), news.decode().splitlines()
