"""Reporter: every record reaches each tracker; the other ranks write nothing and wait for nothing."""

import math
import time
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from training.step import StepResult
from training.telemetry.reporter import Reporter, SilentReporter, SpeedMeter, print_lines
from training.telemetry.time_ledger import Remaining, TimeLedger

REMAINING = Remaining(steps=1, validations=0, checkpoints=0)
GUARD: Any = SimpleNamespace(metrics=lambda: {"skipped_steps": 2})


@attrs.define
class Kept:
    """A tracker that keeps its records."""

    records: list[dict[str, Any]] = attrs.field(factory=list)
    closed: bool = False

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


@attrs.define
class Counter:
    """A progress bar and a chart that count what is asked of them."""

    lines: list[str] = attrs.field(factory=list)
    shown: list[Any] = attrs.field(factory=list)
    warnings: list[str | None] = attrs.field(factory=list)
    drawings: int = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, status: Any) -> None:
        self.shown.append(status)

    def warn(self, warning: str | None) -> None:
        self.warnings.append(warning)

    def close(self) -> None:
        self.lines.append("closed")

    def redraw(self) -> None:
        self.drawings += 1


class Unread:
    """A tensor on the device that must not be read."""

    def item(self) -> float:
        raise AssertionError("the rank waited for its GPU")


def reporter_of(*trackers: Kept) -> tuple[Reporter, Counter]:
    ledger = TimeLedger(time.perf_counter(), price_per_hour=3600.0)
    plan: Any = SimpleNamespace(read_until=lambda step: [{"dataset": "x", "tokens": step, "epochs": 0.5}])
    counter = Counter()
    parts: Any = {"bar": counter, "chart": counter}
    meter = SpeedMeter(ledger, 100, 6, 1000.0)
    device = torch.device("cpu")
    trackers_of: Any = list(trackers)
    return Reporter(
        plan=plan, first_step=3, device=device, ledger=ledger, meter=meter, trackers=trackers_of, **parts
    ), counter


def test_a_logged_step_reaches_every_tracker_and_the_bar() -> None:
    trackers = Kept(), Kept()
    reporter, counter = reporter_of(*trackers)
    with reporter.ledger.measure("training"):
        time.sleep(0.01)
        reporter.log(4, StepResult(0.1, torch.tensor(2.0), torch.tensor(math.inf)), GUARD, REMAINING)
    assert trackers[0].records == trackers[1].records
    [record] = trackers[0].records
    assert (record["step"], record["train_loss"], record["grad_norm"], record["skipped_steps"]) == (4, 2.0, None, 2)
    assert record["epochs"] == [0.5] and record["learning_rate"] == 0.1
    assert reporter.last_loss == 2.0
    [status] = counter.shown
    assert status.loss == 2.0 and status.spent_usd > 0


def test_events_carry_their_step_and_a_checkpoint_redraws_the_chart() -> None:
    tracker = Kept()
    reporter, counter = reporter_of(tracker)
    reporter.event(4, "checkpoint-failed", problem="full")
    assert counter.drawings == 0
    reporter.event(5, "checkpoint", name="step-00000005")
    assert counter.drawings == 1 and counter.warnings == ["step 4 NOT SAVED", None]
    assert [(record["event"], record["step"]) for record in tracker.records] == [
        ("checkpoint-failed", 4),
        ("checkpoint", 5),
    ]
    reporter.record(8, state_sha256="ab")
    assert tracker.records[-1] == {"step": 8, "state_sha256": "ab"}
    reporter.close()
    assert tracker.closed and counter.lines == ["closed"]


def test_speed_is_measured_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    ledger = TimeLedger(0.0)
    meter, unknown = SpeedMeter(ledger, 100, 6, 1000.0), SpeedMeter(ledger, 100, 6, None)
    with ledger.measure("training"):
        now[0] = 10.0
        assert meter.read(2) == (20.0, 6 * 20.0 / 1000.0)
        now[0] = 11.0
        assert meter.read(3) == (100.0, 0.6)
        assert unknown.read(3)[1] is None


def test_other_ranks_print_what_concerns_their_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    silent, unread = SilentReporter(), Unread()
    result: Any = SimpleNamespace(loss=unread, grad_norm=unread)
    silent.log(1, result, GUARD, REMAINING)
    silent.event(1, "start")
    silent.say("of rank 0")
    silent.record(1, validation_loss=2.0)
    assert silent.finish() is False and math.isnan(silent.last_loss)
    silent.say_on_machine("WARNING: a file was touched")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "WARNING: a file was touched\n")


def test_both_reporters_have_the_same_methods() -> None:
    methods = [{name for name in vars(kind) if not name.startswith("_")} for kind in (Reporter, SilentReporter)]
    fields = {field.name for field in attrs.fields(Reporter)}
    assert methods[0] - fields == methods[1] - fields


def test_rank_0_prints_lines_with_warnings_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for coordinates in (True, False):
        ranks: Any = SimpleNamespace(coordinates=coordinates)
        print_lines(ranks, ["resuming", "WARNING: numerics changed"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("resuming\n", "WARNING: numerics changed\n")
