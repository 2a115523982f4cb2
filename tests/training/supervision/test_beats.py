"""Beats: who is silent, for how many polls, and how that reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import train
from training.parallel.step_clock import StepSeconds
from training.supervision.beats import Beat, Beats
from training.telemetry.metrics_log import read_metrics


def beat(count: int, **fields: Any) -> Beat:
    values = {"departure": None, "host": "box", "node": "0", "pid": 7, "step": 3, "place": "training/step.py:1, run"}
    return Beat(count=count, **{**values, **fields})


def polled(*counts: int, **fields: Any) -> Beats:
    """Return what a poll a second saw of rank 1 of two; rank 0 beats all the time."""
    beats = Beats(2, poll_seconds=1.0)
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
def test_a_rank_is_lost_after_so_many_polls_without_a_new_beat_unless_it_is_done(
    counts: tuple[int, ...], departure: Any, patience: int, lost: list[int]
) -> None:
    assert polled(*counts, departure=departure).lost(patience) == lost


def test_with_one_rank_lost_others_that_are_silent_for_half_as_long_are_lost_too() -> None:
    beats = Beats(4, poll_seconds=1.0)
    for poll, (second, third) in enumerate([(1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]):
        for rank, count in enumerate([poll, 9, second, third]):
            beats.observe(rank, beat(count))
    assert beats.lost(patience=5) == []
    assert beats.lost(patience=4) == [1]
    assert beats.lost(patience=3) == [1, 2]


def test_a_rank_that_has_begun_no_heartbeat_is_not_lost() -> None:
    beats = Beats(2, poll_seconds=1.0)
    for poll in range(9):
        beats.observe(0, beat(poll))
    assert beats.lost(patience=3) == []


def test_departures_of_some_kinds_are_found() -> None:
    assert polled(5, departure="failed").departed("failed", "cut off")
    assert not polled(5, departure="failed").departed("cut off")


def test_the_report_has_a_line_a_rank_with_silence_and_departure() -> None:
    known = "(box, pid 7"
    assert polled(5, 5, 5, 5).report() == [
        f"rank 0 {known}): at step 3 in training/step.py:1, run",
        f"rank 1 {known}, silent for 3 s): at step 3 in training/step.py:1, run",
    ]
    assert polled(5, 5, 5).report()[1] == f"rank 1 {known}): at step 3 in training/step.py:1, run"
    failed = polled(5, 5, 5, 5, departure="failed", step=None)
    assert failed.report()[1] == f"rank 1 {known}): failed starting up in training/step.py:1, run"
    assert polled(5, 5, 5, 5).silent_seconds(1) == 3


def test_seconds_of_each_rank_are_of_the_steps_since_the_last_time() -> None:
    beats = Beats(2, poll_seconds=1.0)
    answers = []
    for count, (own, late) in enumerate([(1.0, 3.0), (2.0, 6.0), (2.5, 6.0), (4.0, 9.0)]):
        for rank, seconds in enumerate((own, late)):
            steps = 10 * count if rank == 0 else round(10 * late / 3)
            beats.observe(rank, beat(count, seconds=StepSeconds(steps=steps, own=seconds)))
            answers.append(beats.rank_seconds())
    assert answers[:2] == [None, None]
    assert answers[3] == [pytest.approx(0.1), pytest.approx(0.3)]
    assert answers[4:6] == [None, None] and answers[7] == [pytest.approx(0.1), pytest.approx(0.3)]


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
def test_a_slow_rank_is_named(
    make_run: Callable[..., Path], changed_train: Callable[[str], Path], parallel: str
) -> None:
    run = make_run(min_train_tokens=60 * 8 * 32, validation_interval=None, log_interval=1, parallel=parallel)
    done = train(run, ranks=2, script=changed_train(SLOWED))
    assert done.returncode == 0, done.stderr
    measured = [record["rank_seconds"] for record in read_metrics(run) if "rank_seconds" in record]
    assert measured and measured[-1][1] > 1.2 * measured[-1][0]
    assert "slowest: rank 1, 0." in done.stderr
