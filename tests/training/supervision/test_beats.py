"""Beats: which ranks are silent, for how many polls, and how the report describes them.

Exchange of beats: a rank needs a few store operations per poll, silent ranks are noticed, and all ranks learn of them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch.distributed import TCPStore

from tests.conftest import MakeRun, complete
from training.parallel.step_clock import StepSeconds
from training.supervision.beats import Beat, BeatExchange, Beats
from training.telemetry.metrics_log import read_metrics

PATIENCE = 5  # in polls; the smallest number that train.json allows


def beat(count: int, **fields: Any) -> Beat:
    defaults = {"departure": None, "host": "box", "node": "0", "pid": 7, "step": 3}
    return Beat(count=count, **{**defaults, "code_line": "training/step.py:1, run", **fields})


def beats_after_polls(*counts: int, **fields: Any) -> Beats:
    """Return the beats of two ranks after several polls.

    In each poll, rank 0 has a new beat, and the beat of rank 1 has the next number in `counts`.
    """
    beats = Beats(2)
    for poll, count in enumerate(counts):
        beats.observe(0, beat(poll))
        beats.observe(1, beat(count, **fields))
    return beats


@pytest.mark.parametrize(
    ("counts", "departure", "patience", "lost"),
    [
        ((5, 5, 5), None, 3, []),
        ((5, 5, 5, 5), None, 3, [1]),
        ((5, 5, 5, 6), None, 1, []),
        ((5, 5, 5, 5), "done", 3, []),
        ((5, 5, 5, 5), "failed", 3, [1]),
    ],
)
def test_silent_rank_is_lost_unless_it_is_done(
    counts: tuple[int, ...], departure: Any, patience: int, lost: list[int]
) -> None:
    assert beats_after_polls(*counts, departure=departure).lost(patience) == lost


def test_ranks_silent_half_as_long_are_lost_too() -> None:
    beats = Beats(4)
    for poll, (second, third) in enumerate([(1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]):
        for rank, count in enumerate([poll, 9, second, third]):
            beats.observe(rank, beat(count))
    assert beats.lost(patience=5) == []
    assert beats.lost(patience=4) == [1]
    assert beats.lost(patience=3) == [1, 2]


def test_rank_without_a_first_beat_is_not_lost() -> None:
    beats = Beats(2)
    for poll in range(9):
        beats.observe(0, beat(poll))
    assert beats.lost(patience=3) == []


def test_report_shows_silence_and_departure_of_each_rank() -> None:
    process = "(box, pid 7"
    assert beats_after_polls(5, 5, 5, 5).report() == [
        f"rank 0 {process}): at step 3 in training/step.py:1, run",
        f"rank 1 {process}, silent for 3 s): at step 3 in training/step.py:1, run",
    ]
    assert beats_after_polls(5, 5, 5).report()[1] == f"rank 1 {process}): at step 3 in training/step.py:1, run"
    failed = beats_after_polls(5, 5, 5, 5, departure="failed", step=None)
    assert failed.report()[1] == f"rank 1 {process}): failed starting up in training/step.py:1, run"


def test_rank_seconds_cover_steps_since_last_report() -> None:
    beats = Beats(2)
    rank_seconds = []
    for count, (first, second) in enumerate([(1.0, 3.0), (2.0, 6.0), (2.5, 6.0), (4.0, 9.0)]):
        for rank, seconds in enumerate((first, second)):
            steps = 10 * count if rank == 0 else round(10 * second / 3)
            beats.observe(rank, beat(count, seconds=StepSeconds(steps=steps, own=seconds)))
            rank_seconds.append(beats.rank_seconds())
    assert rank_seconds[:2] == [None, None]
    assert rank_seconds[3] == [pytest.approx(0.1), pytest.approx(0.3)]
    assert rank_seconds[4:6] == [None, None] and rank_seconds[7] == [pytest.approx(0.1), pytest.approx(0.3)]


SLOWED = """
heartbeat.TIMED_POLLS = 1
plain_loss = step.microbatch_loss


def loss(*arguments):
    time.sleep(0.02 + 0.1 * (os.environ["RANK"] == "1"))
    return plain_loss(*arguments)


step.microbatch_loss = loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_slow_rank_is_named(make_run: MakeRun, changed_train: Callable[[str], Path], parallel: str) -> None:
    run = make_run(min_train_tokens=60 * 8 * 32, validation_interval=None, log_interval=1, parallel=parallel)
    done = complete(run, ranks=2, script=changed_train(SLOWED))
    measured = [record["rank_seconds"] for record in read_metrics(run) if "rank_seconds" in record]
    assert measured and measured[-1][1] > 1.2 * measured[-1][0]
    assert "slowest: rank 1, 0." in done.stderr


@attrs.define
class CountingStore:
    """A connection to a store. It counts operations and their keys."""

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
        self.connections = [CountingStore(server) for _ in range(world_size)]
        self.beats = [Beats(world_size) for _ in range(world_size)]
        self.ranks = [
            BeatExchange(connection, rank, self.beats[rank]) for rank, connection in enumerate(self.connections)
        ]
        self.counts = itertools.count()
        self.poll()  # in the first poll, a rank sees only the ranks that started before it
        self.poll()

    def poll(self, silent: Iterable[int] = (), departed: Iterable[int] = (), departure: str = "done") -> None:
        """Let ranks publish a beat, then poll. Silent ranks do neither; a departed rank publishes its last beat."""
        count = next(self.counts)
        present = [rank for rank in range(len(self.ranks)) if rank not in silent]
        for rank in present:
            self.ranks[rank].publish(beat(count, departure=departure if rank in departed else None))
        for rank in present:
            self.ranks[rank].poll()

    def operations(self, kind: str = "operations") -> list[int]:
        """Return how many store operations each rank has made since the last call of this method.

        With "keys", return how many keys these operations had.
        """
        counts = [connection.counts[kind] for connection in self.connections]
        for connection in self.connections:
            connection.counts[kind] = 0
        return counts


def poll_until_lost(job: Job, silent: list[int]) -> list[int]:
    """Poll until a rank notices lost ranks and announces them; return the lost ranks."""
    for _ in range(PATIENCE + 1):
        job.poll(silent=silent)
        for rank, beats in enumerate(job.beats):
            if rank not in silent and (lost := beats.lost(PATIENCE)):
                job.ranks[rank].announce_lost(lost)
                return lost
    return []


@pytest.mark.parametrize("world_size", [4, 16, 64])
def test_poll_cost_is_independent_of_world_size(world_size: int) -> None:
    job = Job(world_size)
    job.operations(), job.operations("keys")
    for _ in range(10):
        job.poll()
    assert job.operations() == [20] * world_size  # one set and one multi_get per poll
    assert job.operations("keys") == [40] * world_size  # per poll: the rank's own beat, two other beats and the news


@pytest.mark.parametrize(
    "silent",
    [[0], [63], [0, 63], list(range(8, 16)), list(range(56, 64)), [*range(8, 16), *range(24, 32)], list(range(63))],
    ids=["first", "last", "around the end", "a node", "the last node", "two nodes", "all but one"],
)
def test_all_ranks_learn_of_silent_ranks(silent: list[int]) -> None:
    job = Job(64)
    job.poll()
    assert poll_until_lost(job, silent) == silent
    job.operations("keys")
    job.poll(silent)
    present = [rank for rank in range(64) if rank not in silent]
    assert all(sorted(job.ranks[rank].lost()) == silent for rank in present)
    key_counts = sorted(job.operations("keys")[rank] for rank in present)
    assert key_counts[len(key_counts) // 2] <= 4 + len(silent) or len(present) == 1  # most ranks read no further beats


def test_silence_is_judged_by_the_latest_polls() -> None:
    job = Job(16)
    for _ in range(3):
        job.poll(silent=[3])  # rank 2 now reads all beats
    job.operations("keys")
    for _ in range(3):
        job.poll()
    assert job.operations("keys")[2] == 3 * 4  # rank 2 again reads only the beats of two ranks
    assert poll_until_lost(job, [3]) == [3]


def test_finished_ranks_are_skipped_in_the_ring() -> None:
    job = Job(8)
    done = [1, 2, 3]
    for _ in range(3):  # rank 0 learns of one finished rank per poll
        job.poll(departed=done)
    for _ in range(PATIENCE + 1):
        job.poll(silent=[*done, 4])
    assert all(job.beats[rank].lost(PATIENCE) == [4] for rank in (0, 7))


@pytest.mark.parametrize("departure", ["asked to stop", "failed", "cut off"])
def test_departure_reaches_all_ranks_in_one_poll(departure: Any) -> None:
    job = Job(16)
    job.operations("keys")
    job.poll(departed=[9], departure=departure)
    assert all(beats.departed("done", departure) and not beats.departed("done") for beats in job.beats)
    assert job.operations("keys") == [4] * 9 + [5] + [4] * 6
