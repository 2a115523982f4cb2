"""Reporter: every record reaches the metrics log; the other ranks write nothing and wait for nothing."""

import math
import time
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from training.step import StepResult
from training.telemetry.reporter import Reporter, print_lines
from training.telemetry.time_ledger import Remaining, TimeLedger

REMAINING = Remaining(steps=1, validations=0, checkpoints=0)


@attrs.define
class Kept:
    """A metrics log that keeps its records."""

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
    shown: list[tuple[int, str]] = attrs.field(factory=list)
    warnings: list[str | None] = attrs.field(factory=list)
    drawings: int = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, step: int, numbers: str) -> None:
        self.shown.append((step, numbers))

    def warn(self, _: str, warning: str | None) -> None:
        self.warnings.append(warning)

    def close(self) -> None:
        self.lines.append("closed")

    def redraw(self) -> None:
        self.drawings += 1


class Unread:
    """A tensor on the device that must not be read."""

    def item(self) -> float:
        raise AssertionError("the rank waited for its GPU")


def reporter_of(
    kept: Kept | None = None, *, price: float | None = 3600.0, peak: float | None = 1e6
) -> tuple[Reporter, Counter]:
    plan: Any = SimpleNamespace(
        tokens_per_step=100, read_until=lambda step: [{"dataset": "x", "tokens": step, "epochs": 0.5}]
    )
    counter = Counter()
    parts: Any = {"plan": plan, "bar": counter, "chart": counter, "metrics": kept}
    ledger = TimeLedger(time.perf_counter(), price)
    return Reporter(device=torch.device("cpu"), ledger=ledger, peak_tokens=peak and peak / 6, **parts), counter


def log_third_step(reporter: Reporter, clock: list[float]) -> None:
    """Log a step after a slow first and two quick ones, with one more to come."""
    with reporter.ledger.start_up(), reporter.ledger.measure("training"):
        for seconds in (6.0, 2.0, 2.0):
            clock[0] += seconds
            reporter.ledger.after_step(0.0)
        reporter.log(4, StepResult(0.1, torch.tensor(2.0), torch.tensor(math.inf)), REMAINING)


def test_a_logged_step_reaches_the_metrics_log_and_the_bar(clock: list[float]) -> None:
    kept = Kept()
    reporter, counter = reporter_of(kept)
    log_third_step(reporter, clock)
    [record] = kept.records
    assert (record["step"], record["train_loss"], record["grad_norm"]) == (4, 2.0, None)
    assert record["epochs"] == [0.5] and record["learning_rate"] == 0.1
    assert (record["tokens_per_second"], record["mfu"]) == (30.0, 6 * 30.0 / 1e6)
    assert reporter.last_loss == 2.0
    assert counter.shown == [(4, "loss 2.0000  30 tok/s  MFU 0.0%  ETA 2s  $10.00 spent, $2.00 to go")]


def test_the_bar_shows_what_is_known(clock: list[float]) -> None:
    reporter, counter = reporter_of(price=None, peak=None)
    log_third_step(reporter, clock)
    assert counter.shown == [(4, "loss 2.0000  30 tok/s  ETA 2s")]


def test_events_carry_their_step_and_a_checkpoint_redraws_the_chart() -> None:
    kept = Kept()
    reporter, counter = reporter_of(kept)
    reporter.event(4, "checkpoint-failed", problem="full")
    assert counter.drawings == 0
    reporter.event(5, "checkpoint", name="step-00000005")
    assert counter.drawings == 1 and counter.warnings == ["step 4 NOT SAVED", None]
    assert [(record["event"], record["step"]) for record in kept.records] == [
        ("checkpoint-failed", 4),
        ("checkpoint", 5),
    ]
    reporter.record(8, state_sha256="ab")
    assert kept.records[-1] == {"step": 8, "state_sha256": "ab"}
    reporter.close()
    assert kept.closed and counter.lines == ["closed"]


def test_a_failed_upload_is_marked_in_the_bar_until_one_succeeds() -> None:
    reporter, counter = reporter_of()
    reporter.event(4, "upload-failed", problem="s3://a/b: full")
    reporter.event(6, "upload")
    assert counter.warnings == ["step 4 NOT UPLOADED", None]


def test_other_ranks_print_what_concerns_their_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: Any = None
    ledger = TimeLedger(time.perf_counter())
    quiet = Reporter(plan=nothing, device=torch.device("cpu"), ledger=ledger, peak_tokens=None)
    result: Any = SimpleNamespace(loss=Unread(), grad_norm=Unread())
    quiet.log(1, result, REMAINING)
    quiet.event(1, "checkpoint")
    quiet.step_done()
    quiet.say("of rank 0")
    quiet.record(1, validation_loss=2.0)
    assert quiet.finish() == "no chart" and math.isnan(quiet.last_loss)
    quiet.close()
    quiet.say_on_machine("WARNING: a file was touched")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "WARNING: a file was touched\n")


def test_rank_0_prints_lines_with_warnings_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for coordinates in (True, False):
        ranks: Any = SimpleNamespace(coordinates=coordinates)
        print_lines(ranks, ["resuming", "WARNING: numerics changed"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("resuming\n", "WARNING: numerics changed\n")


def test_seconds_of_each_rank_are_recorded_and_the_slowest_is_named_until_it_is_not_slow(clock: list[float]) -> None:
    kept = Kept()
    reporter, counter = reporter_of(kept)
    for rank_seconds in ([1.0, 1.9, 1.0], None, [1.0, 1.1, 1.0]):
        with reporter.ledger.measure("training"):
            clock[0] += 1
            reporter.ledger.after_step(0.0)
        reporter.log(4, StepResult(0.1, torch.tensor(2.0), torch.tensor(1.0)), REMAINING, rank_seconds)
    assert [one["rank_seconds"] for one in kept.records if "rank_seconds" in one] == [[1.0, 1.9, 1.0], [1.0, 1.1, 1.0]]
    assert counter.warnings == ["slowest: rank 1, 1.9 s a step (median 1)", None]
