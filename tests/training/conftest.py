"""Shared by the tests of training: a clock that a test can set, a small set of tokens, changed versions of train.py."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests import launch
from tests.conftest import ROOT
from training import build
from training.checkpoints.initial_weights import start_random
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.exactness.fingerprint import resolve_numerics
from training.parallel.process_group import Ranks
from training.state import StepSettings, TrainState
from training.telemetry.time_ledger import TimeLedger

CHANGED_TRAIN = """
import os
import signal
import time

import torch

import train
from training import build, job, loop, step
from training.replay import self_test
from training.parallel import mesh, process_group
from training.supervision import heartbeat

{changes}
train.leave(train.main())
"""
AT_STEP_3 = """
plain_step = step.train_step


def changed(state, settings, number, next_batch):
    rank = state.parallel.data_parallel.rank
    if number == 2 and rank in {ranks}:
        {statement}
    return plain_step(state, settings, number, next_batch)


loop.train_step = changed
"""


@pytest.fixture
def changed_train(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a version of train.py. Its argument is code that changes the imported modules."""

    def write(changes: str) -> Path:
        script = tmp_path / "changed_train.py"
        script.write_text(CHANGED_TRAIN.format(changes=changes))
        return script

    return write


@pytest.fixture
def at_step_3(changed_train: Callable[[str], Path]) -> Callable[..., Path]:
    """Return a function that writes a version of train.py in which some ranks run a statement before step 3.

    By default, only rank 1 runs it.
    """
    return lambda statement, ranks=(1,): changed_train(AT_STEP_3.format(statement=statement, ranks=ranks))


class Watched(TorchDispatchMode):
    """Calls `observe` with each torch operation and its result."""

    def __init__(self, observe: Callable[[Any, Any], None]):
        super().__init__()
        self.observe = observe

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **kwargs or {})
        self.observe(function, returned)
        return returned


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of time.perf_counter(), as the only element of a list, so that a test can set it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files with the bytes of one small module: 33 windows of 32 tokens, and no validation tokens."""
    directory = tmp_path_factory.mktemp("tokens") / "few"
    source = str(Path(os.__file__).with_name("keyword.py"))
    options = ("--output", str(directory), "--tokenizer", "bytes", "--validation-fraction", "0", "--executor", "inline")
    launch.run(ROOT / "prepare_data.py", source, *options).check_returncode()
    return directory


def state_of(run: Path, ranks: Ranks) -> tuple[TrainState, StepSettings]:
    """Return the training state and step settings of a run directory before its first step."""
    config = load_run(run, [])
    plan = make_plan(config.train, config.model.context_length, ranks.world_size, {"x": 100_000})
    numerics = resolve_numerics(config.train, ranks.device)
    state = build.make_state(config.model, config.train, plan, numerics, ranks)
    start_random(state, config.train.random_seed)
    return state, build.make_settings(config.train, plan, numerics)


def ledger_of(clock: list[float], *, price: float | None = None) -> TimeLedger:
    """Return a ledger after 4 s of start-up, steps of 9, 2 and 2 s, a validation of 5 s and 1 s of idle time."""
    ledger = TimeLedger(clock[0], price)
    with ledger.start_up():
        clock[0] += 4.0
    with ledger.measure("training"):
        for seconds in (9.0, 2.0, 2.0):
            clock[0] += seconds
            ledger.after_step(0.0)
        with ledger.measure("validation"):
            clock[0] += 5.0
    clock[0] += 1.0
    return ledger
