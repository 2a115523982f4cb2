"""Where time and money go, and runs that stop before they cost more than they may."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import BadInput
from tests.conftest import train
from tests.training.test_session import one_line
from tests.training.test_stopping import SLOW, outcome
from training.budget import Budget
from training.ledger import Earlier, Ledger, Remaining, read_earlier
from training.metrics import METRICS, read_metrics

DOLLAR_A_SECOND = ("--price-per-hour", "3600")
LONG = {"max_epochs": 9, "min_train_tokens": 2000 * 8 * 32, "validation_interval": None, "checkpoint_interval": 20}


def last_ledger(run: Path) -> dict[str, Any]:
    """Return the record that a job ends with."""
    return json.loads((run / METRICS).read_text().splitlines()[-1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def ledger_of(clock: list[float], *, price: float | None = None) -> Ledger:
    """Return a ledger after 4 s of start-up, steps of 9, 2 and 2 s, a validation of 5 s and an idle second."""
    ledger = Ledger(clock[0], price)
    with ledger.start_up():
        clock[0] += 4.0
    with ledger.measure("training"):
        for seconds in (9.0, 2.0, 2.0):
            clock[0] += seconds
            ledger.after_step()
        with ledger.measure("validation"):
            clock[0] += 5.0
    clock[0] += 1.0
    return ledger


def test_a_ledger_adds_up_to_the_clock_and_foresees_what_is_due(clock: list[float]) -> None:
    ledger = ledger_of(clock)
    assert ledger.breakdown(waited_for_data_seconds=1.0) == {
        "start-up": 4.0,
        "data": 1.0,
        "compile": 7.0,
        "training": 5.0,
        "validation": 5.0,
        "checkpoints": 0.0,
        "idle": 1.0,
    }
    assert ledger.process_seconds() == 23.0
    assert ledger.remaining_seconds(Remaining(steps=10, validations=2, checkpoints=1)) == 10 * 2.0 + 2 * 5.0


def test_what_earlier_jobs_cost_stays_at_their_price_and_lost_work_counts(clock: list[float], tmp_path: Path) -> None:
    first = ledger_of(clock, price=3600).record(0.0)
    lines = [first, {"step": 9, "train_loss": 1.0, "elapsed_seconds": 33.0}, {"event": "start", "step": 0}]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    earlier = read_earlier(tmp_path, checkpoint_seconds=20.0)
    assert (earlier.elapsed_seconds, earlier.seconds["lost"]) == (33.0, 10.0)  # the second job was killed
    second = ledger_of(clock, price=7200)
    second.earlier = earlier
    assert second.usd() == 23 + 2 * (10 + 23)
    record = second.record(0.0)
    assert sum(record["run_ledger"].values()) == record["elapsed_seconds"] == 33.0 + 23.0
    assert read_earlier(tmp_path / "absent", checkpoint_seconds=20.0).seconds == {"lost": 20.0}


@pytest.mark.parametrize(("hours", "usd", "option"), [(1.0, 40.0, "--max-usd"), (0.0125, 40.0, "--max-hours")])
def test_the_nearest_limit_counts_what_the_stop_takes(
    clock: list[float], hours: float, usd: float, option: str
) -> None:
    ledger = ledger_of(clock, price=3600)
    ledger.earlier = Earlier(elapsed_seconds=10.0, usd=2.0)
    budget = Budget(max_hours=hours, max_usd=usd)
    left = {"--max-usd": 40 - 25, "--max-hours": 45 - 33}[option]
    assert budget.seconds_left(ledger) == (pytest.approx(left), option)
    steps_and_end = 2 * 2.0 + 3.0
    assert not budget.reached(ledger, save_seconds=left - steps_and_end - 0.1)
    assert budget.reached(ledger, save_seconds=left - steps_and_end + 0.1)
    with pytest.raises(BadInput, match=f"^{option} .* nothing is left to train with; raise {option}$"):
        budget.check_start(ledger, save_seconds=100.0)


def test_a_run_stops_within_its_budget_with_a_checkpoint_and_goes_on_with_a_larger_one(
    make_run: Callable[..., Path],
) -> None:
    run = make_run(**LONG)
    environment = {"SLOW_STEP": "0.02"}
    done = train(run, *DOLLAR_A_SECOND, "--max-usd", "9", ranks=2, script=SLOW, environment=environment)
    assert done.returncode == 1, done.stderr  # torchrun's
    assert outcome(run) == "stopped", done.stderr
    assert "stopped early by --max-usd; the same command with a larger --max-usd continues" in done.stdout
    first = last_ledger(run)
    assert 4 < first["usd"] <= 9 * 1.01
    stopped = [record for record in read_metrics(run) if record.get("event") == "stopped"]
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert [(record["reason"], record["step"]) for record in stopped] == [("--max-usd", state["step"])]
    again = train(run, *DOLLAR_A_SECOND, "--max-usd", "9", ranks=2)
    line = one_line(again)
    assert "--max-usd 9: the run has taken" in line and "nothing is left to train with; raise --max-usd" in line
    hours = (first["elapsed_seconds"] + 8) / 3600
    began = time.monotonic()
    more = train(run, "--max-hours", f"{hours:.6f}", script=SLOW, environment=environment)
    took = time.monotonic() - began
    assert more.returncode == 75, more.stderr
    assert f"resuming from {run}/checkpoints/step-{state['step']:08d}" in more.stdout
    second = last_ledger(run)
    assert second["elapsed_seconds"] <= hours * 3600 * 1.01
    assert sum(second["ledger"].values()) == pytest.approx(took, rel=0.01, abs=0.3)  # the test's own clock, forks
    assert sum(second["run_ledger"].values()) == pytest.approx(second["elapsed_seconds"], rel=0.001)
    assert second["ledger"]["training"] > 0.3 * took
