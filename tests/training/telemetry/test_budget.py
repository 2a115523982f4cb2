"""Budget: a run stops, with a checkpoint, before it exceeds --max-hours or --max-usd."""

import json
import time
from itertools import pairwise

import pytest

from common.errors import BadInput
from tests.conftest import MakeRun, one_line, train
from tests.training.conftest import ledger_of
from tests.training.supervision.runs import SLOW, exit_of
from training.telemetry.budget import END_SECONDS, Budget
from training.telemetry.metrics_log import read_metrics
from training.telemetry.time_ledger import Earlier

DOLLAR_A_SECOND = ("--price-per-hour", "3600")
LONG = {"max_epochs": 9, "min_train_tokens": 2000 * 8 * 32, "validation_interval": None, "checkpoint_interval": 40}


@pytest.mark.parametrize(("hours", "usd", "option"), [(1.0, 40.0, "--max-usd"), (0.0125, 40.0, "--max-hours")])
def test_nearest_limit_includes_time_to_stop(clock: list[float], hours: float, usd: float, option: str) -> None:
    ledger = ledger_of(clock, price=3600)
    ledger.earlier = Earlier(seconds=10.0, usd=2.0)
    budget = Budget(max_hours=hours, max_usd=usd)
    remaining = {"--max-usd": 40 - 25, "--max-hours": 45 - 33}[option]
    assert budget.seconds_left(ledger) == (pytest.approx(remaining), option)
    steps_and_end = 2 * 2.0 + 4.0
    assert not budget.reached(ledger, save_seconds=remaining - steps_and_end - 0.1)
    assert budget.reached(ledger, save_seconds=remaining - steps_and_end + 0.1)
    with pytest.raises(BadInput, match=f"^{option} .* no time is left for training; raise {option}$"):
        budget.check_start(ledger, save_seconds=100.0)


@pytest.mark.slow
def test_run_stops_within_its_budget_and_continues(make_run: MakeRun) -> None:
    run = make_run(**LONG)
    environment = {"SLOW_STEP": "0.05"}
    done = train(run, *DOLLAR_A_SECOND, "--max-usd", "14", ranks=2, script=SLOW, environment=environment)
    assert done.returncode == 1, done.stderr  # the status of torchrun
    assert (exit_of(run).outcome, exit_of(run).reason) == ("stopped", "out-of-budget"), done.stderr
    assert "stopped early by --max-usd; to continue, run the same command with a larger --max-usd" in done.stdout
    first = read_metrics(run)[-1]
    ends = [record["elapsed_seconds"] for record in read_metrics(run) if "train_loss" in record]
    reserve = END_SECONDS + 3 * max(after - before for before, after in pairwise(ends)) + first["ledger"]["checkpoints"]
    assert 14 - reserve < first["usd"] <= 14
    stopped = [record for record in read_metrics(run) if record.get("event") == "stopped"]
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert [(record["reason"], record["step"]) for record in stopped] == [("--max-usd", state["step"])]
    [start] = [record for record in read_metrics(run) if record.get("event") == "start"]
    assert start["price_per_hour"] == 3600
    # The elapsed time is recorded at the start, because the job might be killed.
    assert start["elapsed_seconds"] == pytest.approx(first["ledger"]["start-up"], abs=0.1)
    usd = round(first["usd"], 2)
    line = one_line(train(run, *DOLLAR_A_SECOND, "--max-usd", f"{usd}", ranks=2))
    assert f"--max-usd {usd:g}: including this start, the run has taken" in line
    assert "no time is left for training; raise --max-usd" in line
    assert (exit_of(run).status, exit_of(run).reason) == (1, "out-of-budget")
    hours = (first["elapsed_seconds"] + 10) / 3600
    clock = time.monotonic()
    more = train(run, "--max-hours", f"{hours:.6f}", script=SLOW, environment=environment)
    duration = time.monotonic() - clock
    assert more.returncode == 75, more.stderr
    assert f"resuming from {run}/checkpoints/step-{state['step']:08d}" in more.stdout
    second = read_metrics(run)[-1]
    assert second["elapsed_seconds"] <= hours * 3600 * 1.01
    assert sum(second["ledger"].values()) <= duration  # the duration also includes the fork and the end of the process
    assert sum(second["run_ledger"].values()) == pytest.approx(second["elapsed_seconds"], rel=0.001)
    assert second["ledger"]["training"] > 0
