"""Training loop: the order of the work after a step, stops with a checkpoint, and garbage collection between steps."""

import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import Diverged
from tests.conftest import MakeRun
from training import loop
from training.build import make_intervals
from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.loop import GARBAGE_INTERVAL_STEPS, Intervals, Loop, collect_garbage
from training.parallel.step_clock import StepClock
from training.state import Position
from training.telemetry.time_ledger import Remaining, TimeLedger

INTERVALS = Intervals(log=2, checkpoint=4, validation=3, state_hash=None, last_step=5)


def loop_of(monkeypatch: pytest.MonkeyPatch, done: list[str], *, stop_at: int = 99, bad_step: int = 99) -> Loop:
    """Return a training loop with fake parts, which append each action to `done`."""
    fake: Any = SimpleNamespace
    state = fake(position=Position(best_validation_loss=1.5, best_step=0))

    def note(action: str) -> Any:
        return lambda *_, **__: done.append(f"{action} {state.position.step}")

    def train(*_: Any) -> Any:
        done.append(f"train {state.position.step + 1}")

    def save() -> None:
        saving.newest = state.position.step
        done.append(f"save {state.position.step}")

    def validate(*_: Any) -> float:
        done.append(f"validate {state.position.step}")
        return 3.0 - state.position.step / 2

    state.guard = fake(problem=lambda: f"step {bad_step}" if state.position.step >= bad_step else None)
    state.parallel = fake(clock=StepClock(torch.device("cpu")))
    saving = fake(begin=save, poll=lambda: None, settle=lambda **_: None, newest=None, directory="run/checkpoints")
    monkeypatch.setattr(loop, "train_step", train)
    monkeypatch.setattr(loop, "collect_garbage", lambda _: None)
    reporter = fake(
        log=note("log"),
        event=lambda step, event, **details: done.append(f"{event} {step} {details.get('reason', '')}".rstrip()),
        record=lambda *_, **__: None,
        step_done=lambda: None,
        ledger=TimeLedger(time.perf_counter()),
        plan=fake(steps=8, tokens_per_step=10, read_until=lambda _: []),
    )
    unused: Any = None
    ranks = fake(device=fake(type="cuda"), node=fake(rank=1))
    heartbeat = fake(ranks=ranks, begin_step=lambda *_: None, beats=fake(rank_seconds=lambda: None))
    parts: Any = {
        "state": state,
        "feed": fake(waited_seconds=0.0, next=unused, wait_for_tokens=lambda *_: True),
        "validations": {"first": fake(measure=validate), "second": fake(measure=lambda *_: 9.0)},
        "saving": saving,
        "reporter": reporter,
        "heartbeat": heartbeat,
        "stop_request": fake(agreed=lambda: state.position.step >= stop_at, cause="signal"),
    }
    return Loop(settings=unused, intervals=INTERVALS, **parts)


def test_loop_logs_validates_and_saves_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    training = loop_of(monkeypatch, done)
    assert training.run_steps()
    assert done == [
        *("validate 0", "train 1", "log 1", "train 2", "log 2", "train 3", "validate 3"),
        *("train 4", "log 4", "validate 4", "save 4"),
        *(
            "train 5",
            "log 5",
            "validate 5",
            "save 5",
            "pause 5",
        ),  # "pause" because --max-steps ends the job before step 8
    ]
    position = training.state.position
    assert (position.tokens, position.validation_loss) == (50, 0.5)
    assert (position.best_step, position.best_validation_loss) == (5, 0.5)


def test_stop_saves_the_last_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for stop_at, last in ((3, ["validate 3", "save 3"]), (4, ["validate 4", "save 4"])):
        done: list[str] = []
        assert not loop_of(monkeypatch, done, stop_at=stop_at).run_steps()
        assert done[-3:] == [*last, f"stopped {stop_at} signal"]


def test_bad_step_ends_the_run_without_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    with pytest.raises(Diverged, match="step 4; the last checkpoint, in run/checkpoints, is unchanged"):
        loop_of(monkeypatch, done, bad_step=4).run_steps()
    assert done[-2:] == ["train 4", "diverged 4"]
    assert not any(action.startswith("save") for action in done)


class Knot:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_collected_at_fixed_steps() -> None:
    try:
        collect_garbage(1)
        knot = weakref.ref(Knot())
        objects = [[] for _ in range(100_000)]  # enough allocations to start a collection if it were enabled
        collect_garbage(GARBAGE_INTERVAL_STEPS - 1)
        assert knot() is not None and len(objects) == 100_000
        collect_garbage(GARBAGE_INTERVAL_STEPS)
        assert knot() is None
    finally:
        gc.enable()
        gc.unfreeze()


DUE = Intervals(log=4, checkpoint=6, validation=5, state_hash=7, last_step=20)


def steps_due(name: str) -> list[int]:
    return [step for step in range(21) if getattr(DUE, f"{name}_due")(step)]


def test_work_is_due_at_intervals_and_the_end() -> None:
    assert steps_due("log") == [0, 1, 4, 8, 12, 16, 20]
    assert steps_due("checkpoint") == [6, 12, 18, 20]
    assert steps_due("validation") == [0, 5, 6, 10, 12, 15, 18, 20]  # also with each checkpoint
    assert steps_due("hash") == [0, 7, 14]


def test_no_validation_is_due_without_an_interval() -> None:
    silent = Intervals(log=1, checkpoint=2, validation=None, state_hash=None, last_step=4)
    assert not any(silent.validation_due(step) or silent.hash_due(step) for step in range(5))
    assert silent.remaining(1) == Remaining(steps=3, validations=0, checkpoints=2)


@pytest.mark.parametrize("step", [1, 6, 7, 19, 20])
def test_remaining_work_is_due_from_the_step(step: int) -> None:
    remaining = DUE.remaining(step)
    later = range(step, 21)
    assert remaining.steps == 20 - step
    assert remaining.validations == sum(map(DUE.validation_due, later))
    assert remaining.checkpoints == sum(map(DUE.checkpoint_due, later))


@pytest.mark.parametrize(("max_steps", "last_step"), [(None, 8), (3, 3), (50, 8)])
def test_job_ends_with_the_run_or_earlier(make_run: MakeRun, max_steps: int | None, last_step: int) -> None:
    run = load_run(make_run(checkpoint_interval=4, validation_interval=2, log_interval=5), [])
    plan = make_plan(run.train, run.model.context_length, 1, {"x": 100_000})
    intervals = make_intervals(run.train, plan, Options(max_steps=max_steps, hash_every=7))
    assert intervals.last_step == last_step
    assert (intervals.checkpoint, intervals.validation, intervals.log, intervals.state_hash) == (4, 2, 5, 7)
