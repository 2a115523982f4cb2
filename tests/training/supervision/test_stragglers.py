"""Stragglers: who is slow for long enough, in which phase, named once; real ranks that are slow for a while."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.training.supervision.runs import LONG, outcome, wait_for_step, wait_until
from tests.training.supervision.test_beats import beat
from training.parallel.step_clock import StepSeconds
from training.supervision.beats import Beat
from training.supervision.stragglers import WINDOWS, Stragglers, Straggling
from training.telemetry.metrics_log import read_metrics

EVEN = (0.1, 0.0)  # own seconds and, of these, seconds of waiting for data
COMPUTE, DATA = (0.18, 0.0), (0.18, 0.08)


class Job:
    """Four ranks on two nodes that take ten steps a window."""

    def __init__(self) -> None:
        self.judge = Stragglers(4)
        self.totals = [StepSeconds()] * 4
        self.window()

    def window(self, *ranks: tuple[float, float], rest: float = 0.02, steps: int = 10) -> list[Straggling]:
        """Judge a window; the first ranks as told, the others even. `rest`: seconds after the latest rank's own."""
        means = [*ranks, *[EVEN] * 4][:4]
        whole = max(own for own, _ in means) + rest
        for rank, (total, (own, data)) in enumerate(zip(self.totals, means, strict=True)):
            values = StepSeconds(whole=whole, own=own, data=data)
            sums = {name: getattr(total, name) + steps * getattr(values, name) for name in ("whole", "own", "data")}
            self.totals[rank] = StepSeconds(steps=total.steps + steps, **sums)
        return self.judge.judge(self.beats())

    def beats(self) -> dict[int, Beat]:
        nodes = [{"node": str(rank // 2), "host": "ab"[rank // 2]} for rank in range(4)]
        return {rank: beat(1, seconds=self.totals[rank], **node) for rank, node in enumerate(nodes)}

    def windows(self, *ranks: tuple[float, float], count: int = WINDOWS, **keys: Any) -> list[Straggling]:
        return [found for _ in range(count) for found in self.window(*ranks, **keys)]


@pytest.mark.parametrize(("slow", "phase"), [(COMPUTE, "compute"), (DATA, "data")])
def test_a_slow_rank_is_named_once_with_its_phase_and_once_when_it_is_no_longer_slow(slow: Any, phase: str) -> None:
    job = Job()
    assert job.windows(EVEN, slow, count=WINDOWS - 1) == []
    [found] = job.windows(EVEN, slow, count=9)
    assert (found.ranks, found.mark) == ([1], "SLOW: rank 1")
    assert found.line() == f"rank 1 (host a, node 0): 1.8 times as slow as the median rank for 30 s, in {phase}"
    [ended] = job.windows(count=9)
    assert (ended.line(), ended.mark) == ("rank 1 (host a, node 0): no longer slow", None)


def test_a_slow_node_is_named_as_one() -> None:
    job = Job()
    [found] = job.windows(COMPUTE, DATA)
    assert found.line() == "node 0 (host a, ranks 0, 1): 1.8 times as slow as the median rank for 30 s, in compute"
    assert (found.ranks, found.mark) == ([0, 1], "SLOW: rank 0, rank 1")
    assert [ended.ranks for ended in job.windows(EVEN, DATA)] == [[0]]


def test_little_or_short_slowness_names_nobody() -> None:
    job = Job()
    assert job.windows((0.119, 0.0), count=9) == []
    assert [job.windows(COMPUTE, count=2) + job.windows(count=1) for _ in range(3)] == [[]] * 3
    quick = [(0.009, 0.0), *[(0.001, 0.0)] * 3]  # nine times as slow, and all of it noise
    assert job.windows(*quick, count=9) == []


def test_a_window_lasts_until_every_rank_has_taken_a_step() -> None:
    job = Job()
    assert job.windows(COMPUTE, count=9, steps=0) == []
    assert len(job.windows(COMPUTE)) == 1
    assert Stragglers(4).judge({0: beat(1)}) == []


def test_communication_that_takes_longer_than_before_is_nobodys() -> None:
    job = Job()
    assert job.windows(rest=0.02) == []
    assert job.windows(rest=0.07) == []
    [found] = job.windows(rest=0.09)
    assert found.line() == "all ranks: 1.6 times as slow as at best for 30 s, in communication"
    assert (found.ranks, found.mark) == ([0, 1, 2, 3], "SLOW: all ranks")
    [ended] = job.windows(rest=0.02)
    assert ended.line() == "all ranks: no longer slow"


SLOWED = """
import os
import time
from pathlib import Path

import train
from training import loop, prefetch, step
from training.parallel import ordered_reduce
from training.supervision import heartbeat, stragglers

heartbeat.WINDOW_SECONDS = stragglers.WINDOW_SECONDS = 1.0
plain_read, plain_loss, plain_step = prefetch.micro_batches, step.microbatch_loss, loop.train_step
plain_reduce = ordered_reduce.ordered_all_reduce


def pause(phase):
    here = phase == os.environ["PHASE"] and os.environ["RANK"] in os.environ["SLOW_RANKS"]
    if here and Path(os.environ["SWITCH"]).exists():
        time.sleep(0.3 if phase == "data" else 0.1)  # reading goes on beside the steps


def read(*arguments):
    for batch in plain_read(*arguments):
        pause("data")
        yield batch


def loss(*arguments):
    pause("compute")
    return plain_loss(*arguments)


def reduce(*arguments):
    pause("communication")
    return plain_reduce(*arguments)


def evenly(*arguments):
    time.sleep(0.1)
    return plain_step(*arguments)


prefetch.micro_batches, step.microbatch_loss, loop.train_step = read, loss, evenly
ordered_reduce.ordered_all_reduce = reduce
train.leave(train.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "slow", "parallel"),
    [("data", "1", "ddp"), ("data", "1", "fsdp"), ("compute", "1", "ddp"), ("communication", "01", "ddp")],
)
def test_ranks_that_are_slow_for_a_while_are_named_in_time(
    make_run: Callable[..., Path], tmp_path: Path, phase: str, slow: str, parallel: str
) -> None:
    script, switch = tmp_path / "slowed.py", tmp_path / "switch"
    script.write_text(SLOWED)
    run = make_run(**LONG | {"min_train_tokens": 50_000 * 8 * 32, "max_epochs": 100, "parallel": parallel})
    environment = {"PHASE": phase, "SLOW_RANKS": slow, "SWITCH": str(switch)}
    process = launch.start(script, str(run), "--device", "cpu", ranks=2, environment=environment)

    def events() -> list[dict[str, Any]]:
        found = [record for record in read_metrics(run) if "straggler" in record.get("event", "")]
        return [record for record in found if record["ranks"] != [0, 1] or slow == "01"]  # a busy machine slows all

    wait_for_step(run, 40, process)  # four windows
    switch.touch()
    wait_until(lambda: len(events()) == 1, process)
    switch.unlink()
    wait_until(lambda: len(events()) == 2, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=180)
    assert outcome(run) == "stopped"
    [begun, ended] = events()
    assert [begun["event"], ended["event"]] == ["straggler", "straggler-end"]
    assert begun["ranks"] == ended["ranks"] == [int(rank) for rank in slow]
    assert begun["phase"] == phase
    assert begun["factor"] > 1.2
    who = "all ranks" if slow == "01" else r"rank 1 \(host \S+, node 0\)"
    than = "at best" if slow == "01" else "the median rank"
    assert re.search(rf"^{who}: \d+\.\d times as slow as {than} for 3 s, in {phase}$", errors, re.MULTILINE)
    assert re.search(rf"^{who}: no longer slow$", errors, re.MULTILINE)
