"""Time ledger: parts add up to the elapsed time, remaining time and cost are estimated, and earlier jobs count once."""

import json
from pathlib import Path
from typing import Any

from tests.training.conftest import ledger_of
from training.telemetry.metrics_log import METRICS
from training.telemetry.time_ledger import Remaining, TimeLedger, read_earlier


def test_ledger_adds_up_and_estimates_the_rest(clock: list[float]) -> None:
    ledger = ledger_of(clock)
    spent = {"start-up": 4, "data": 1, "compile": 7, "training": 5, "validation": 5, "checkpoints": 0, "idle": 1}
    assert ledger.record(waited_for_data_seconds=1.0)["ledger"] == spent
    assert ledger.process_seconds() == 23.0
    assert ledger.remaining_seconds(Remaining(steps=10, validations=2, checkpoints=1)) == 10 * 2.0 + 2 * 5.0


def test_waiting_for_data_is_not_step_time(clock: list[float]) -> None:
    ledger = TimeLedger(clock[0])
    with ledger.start_up(), ledger.measure("training"):
        for seconds, waited in ((3609.0, 3600.0), (2.0, 3600.0), (902.0, 4500.0), (2.0, 4500.0)):
            clock[0] += seconds
            ledger.after_step(waited)
    assert ledger.longest_step_seconds() == 2.0
    parts = ledger.record(4500.0)["ledger"]
    assert parts["data"] == 4500.0 and parts["compile"] + parts["training"] == 15.0


def test_speed_is_measured_between_two_readings(clock: list[float]) -> None:
    ledger = TimeLedger(clock[0])
    with ledger.start_up(), ledger.measure("training"):
        for seconds, steps, speed in ((10.0, 2, 0.2), (1.0, 1, 1.0)):
            clock[0] += seconds
            for _ in range(steps):
                ledger.after_step(0.0)
            assert ledger.steps_per_second() == speed


def test_earlier_jobs_keep_their_price(clock: list[float], tmp_path: Path) -> None:
    def start(price: float | None) -> dict[str, Any]:
        return {"event": "start", "step": 0, "price_per_hour": price}

    first = ledger_of(clock, price=3600).record(0.0)
    killed = [start(1800), {"step": 9, "train_loss": 1.0, "elapsed_seconds": 33.0}]
    lines = [start(3600), first, *killed, start(None), {"step": 9, "train_loss": 1.0, "elapsed_seconds": 40.0}]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    earlier = read_earlier(tmp_path, checkpoint_seconds=20.0)
    assert (earlier.seconds, earlier.parts["lost"]) == (40.0, 10.0 + 7.0)  # two jobs were killed
    fourth = ledger_of(clock, price=7200)
    fourth.earlier = earlier
    assert fourth.usd() == 23 + 10 / 2 + 2 * (7 + 23)
    record = fourth.record(0.0)
    assert sum(record["run_ledger"].values()) == record["elapsed_seconds"] == 40.0 + 23.0
    assert read_earlier(tmp_path / "absent", checkpoint_seconds=20.0).parts == {"lost": 20.0}
