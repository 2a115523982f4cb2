"""Exchange of beats: a few store operations a rank and poll, whoever is silent is found, and all ranks hear of it."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs
import pytest
from torch.distributed import TCPStore

from tests.training.supervision.test_beats import beat
from training.supervision.beat_exchange import BeatExchange
from training.supervision.beats import Beats

PATIENCE = 5  # polls, the fewest that train.json allows


@attrs.define
class Counted:
    """A connection to a store that counts operations, and the keys that they name."""

    store: TCPStore
    counts: Counter[str] = attrs.field(factory=Counter)

    def __getattr__(self, operation: str) -> Any:
        def call(keys: Any, *values: Any) -> Any:
            self.counts.update(operations=1, keys=len(keys) if isinstance(keys, list) else 1)
            return getattr(self.store, operation)(keys, *values)

        return call


class Job:
    """Ranks that exchange beats in one process, poll by poll."""

    def __init__(self, world_size: int):
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.connections = [Counted(server) for _ in range(world_size)]
        self.beats = [Beats(world_size, 1.0) for _ in range(world_size)]
        self.ranks = [
            BeatExchange(connection, rank, self.beats[rank]) for rank, connection in enumerate(self.connections)
        ]
        self.counts = itertools.count()
        self.poll()  # each finds those that begun before it
        self.poll()

    def poll(self, silent: Iterable[int] = (), departed: Iterable[int] = (), departure: str = "done") -> None:
        """Have the ranks beat, then poll; silent ones do neither, departed ones have left with a last beat."""
        count = next(self.counts)
        present = [rank for rank in range(len(self.ranks)) if rank not in silent]
        for rank in present:
            self.ranks[rank].publish(beat(count, departure=departure if rank in departed else None))
        for rank in present:
            self.ranks[rank].poll()

    def operations(self, kind: str = "operations") -> list[int]:
        """Return the count of each rank since the last call."""
        counts = [connection.counts[kind] for connection in self.connections]
        for connection in self.connections:
            connection.counts[kind] = 0
        return counts


def lost_by_one(job: Job, silent: list[int]) -> list[int]:
    """Poll until a rank finds lost ones and tells the others; return these."""
    for _ in range(PATIENCE + 1):
        job.poll(silent=silent)
        for rank, beats in enumerate(job.beats):
            if rank not in silent and (lost := beats.lost(PATIENCE)):
                job.ranks[rank].tell_lost(lost)
                return lost
    return []


@pytest.mark.parametrize("world_size", [4, 16, 64])
def test_a_quiet_poll_has_as_many_operations_whatever_the_world_size(world_size: int) -> None:
    job = Job(world_size)
    job.operations(), job.operations("keys")
    for _ in range(10):
        job.poll()
    assert job.operations() == [20] * world_size  # set, multi_get
    assert job.operations("keys") == [40] * world_size  # the own beat; two beats and the news


@pytest.mark.parametrize(
    "silent",
    [[0], [63], [0, 63], list(range(8, 16)), list(range(56, 64)), [*range(8, 16), *range(24, 32)], list(range(63))],
    ids=["first", "last", "around the end", "a node", "the last node", "two nodes", "all but one"],
)
def test_silent_ranks_are_found_though_few_are_watched_and_all_ranks_hear_of_them(silent: list[int]) -> None:
    job = Job(64)
    job.poll()
    assert lost_by_one(job, silent) == silent
    job.operations("keys")
    job.poll(silent)
    present = [rank for rank in range(64) if rank not in silent]
    assert all(sorted(job.ranks[rank].lost()) == silent for rank in present)
    read = sorted(job.operations("keys")[rank] for rank in present)
    assert read[len(read) // 2] <= 4 + len(silent) or len(present) == 1  # most ranks read no others


def test_ranks_that_were_read_long_ago_count_as_silent_only_from_now_on() -> None:
    job = Job(16)
    for _ in range(3):
        job.poll(silent=[3])  # rank 2 reads all
    job.operations("keys")
    for _ in range(3):
        job.poll()
    assert job.operations("keys")[2] == 3 * 4  # it no longer does
    assert lost_by_one(job, [3]) == [3]


def test_the_next_ranks_that_are_done_are_no_longer_watched_but_those_after_them() -> None:
    job = Job(8)
    done = [1, 2, 3]
    for _ in range(3):  # rank 0 learns of them one after the other
        job.poll(departed=done)
    for _ in range(PATIENCE + 1):
        job.poll(silent=[*done, 4])
    assert all(job.beats[rank].lost(PATIENCE) == [4] for rank in (0, 7))


@pytest.mark.parametrize("departure", ["asked to stop", "failed", "cut off"])
def test_all_ranks_hear_of_a_departure_at_their_next_poll(departure: Any) -> None:
    job = Job(16)
    job.operations("keys")
    job.poll(departed=[9], departure=departure)
    assert all(beats.departed(departure) for beats in job.beats)
    assert job.operations("keys") == [4] * 9 + [5] + [4] * 6
