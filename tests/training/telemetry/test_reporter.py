"""Reporter: on rank 0, every record reaches the metrics log; other ranks write nothing and wait for nothing."""

import math
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch

from training.step import StepResult
from training.telemetry.chart import BackgroundChart
from training.telemetry.metrics_log import Metric, MetricsLog
from training.telemetry.reporter import ProgressBar, Reporter
from training.telemetry.time_ledger import Remaining, TimeLedger

REMAINING = Remaining(steps=1, validations=0, checkpoints=0)


def reporter_of(*, price: float | None = 3600.0, peak: float | None = 1e6) -> Reporter:
    """Return the reporter of rank 0, with mocks of the metrics log, the bar and the chart."""
    plan: Any = SimpleNamespace(
        tokens_per_step=100, read_until=lambda step: [{"dataset": "x", "tokens": step, "epochs": 0.5}]
    )
    ledger, device = TimeLedger(time.perf_counter(), price), torch.device("cpu")
    kinds = {"bar": ProgressBar, "metrics": MetricsLog, "chart": BackgroundChart}
    parts: Any = {name: create_autospec(kind, instance=True) for name, kind in kinds.items()}
    return Reporter(plan=plan, device=device, ledger=ledger, peak_tokens=peak and peak / 6, **parts)


def last_arguments(method: Any) -> list[Any]:
    """Return the last argument of each call to a mock."""
    return [call.args[-1] for call in method.call_args_list]


def log_third_step(reporter: Reporter, clock: list[float]) -> None:
    """Time a slow step and two quick ones, and log the last of them. One more step is to come."""
    with reporter.ledger.start_up(), reporter.ledger.measure("training"):
        for seconds in (6.0, 2.0, 2.0):
            clock[0] += seconds
            reporter.ledger.after_step(0.0)
        reporter.log(4, StepResult(0.1, torch.tensor(2.0), torch.tensor(math.inf)), REMAINING)


def test_logged_step_reaches_metrics_log_and_bar(clock: list[float]) -> None:
    reporter: Any = reporter_of(price=None, peak=None)
    log_third_step(reporter, clock)
    reporter.bar.show.assert_called_once_with(4, "loss 2.0000  30 tok/s  ETA 2s")  # MFU and cost are unknown
    reporter = reporter_of()
    log_third_step(reporter, clock)
    [record] = last_arguments(reporter.metrics.write)
    assert (record["step"], record["train_loss"], record["grad_norm"]) == (4, 2.0, None)
    assert record["epochs"] == [0.5] and record["learning_rate"] == 0.1
    assert (record["tokens_per_second"], record["mfu"]) == (30.0, 6 * 30.0 / 1e6)
    assert reporter.last_loss == 2.0
    reporter.bar.show.assert_called_once_with(4, "loss 2.0000  30 tok/s  MFU 0.0%  ETA 2s  $10.00 spent, $2.00 to go")


def test_checkpoint_event_redraws_the_chart() -> None:
    reporter: Any = reporter_of()
    reporter.event(4, "checkpoint-failed", problem="full")
    assert not reporter.chart.redraw.called
    reporter.event(5, "checkpoint", name="step-00000005")
    reporter.event(5, "upload-failed", problem="s3://a/b: full")
    assert reporter.chart.redraw.call_count == 1
    assert last_arguments(reporter.bar.warn) == ["step 4 NOT SAVED", None, "step 5 NOT UPLOADED"]
    events = [(record["event"], record["step"]) for record in last_arguments(reporter.metrics.write)]
    assert events == [("checkpoint-failed", 4), ("checkpoint", 5), ("upload-failed", 5)]
    reporter.record(8, {Metric.STATE_SHA256: "ab"})
    assert last_arguments(reporter.metrics.write)[-1] == {"step": 8, "state_sha256": "ab"}
    reporter.close()
    assert reporter.metrics.close.called and reporter.bar.close.called


def test_other_ranks_write_and_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    no_plan: Any = None
    ledger = TimeLedger(time.perf_counter())
    quiet = Reporter(plan=no_plan, device=torch.device("cpu"), ledger=ledger, peak_tokens=None)
    step_result = Mock()
    quiet.log(1, step_result, REMAINING)
    assert step_result.mock_calls == []  # reading a tensor would wait for the GPU
    quiet.event(1, "checkpoint")
    quiet.step_done()
    quiet.record(1, {Metric.VALIDATION_LOSS: 2.0})
    assert quiet.finish() == "no chart" and math.isnan(quiet.last_loss)
    quiet.close()
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_slowest_rank_is_named_while_it_is_slow(clock: list[float]) -> None:
    reporter: Any = reporter_of()
    for rank_seconds in ([1.0, 1.9, 1.0], None, [1.0, 1.1, 1.0]):
        with reporter.ledger.measure("training"):
            clock[0] += 1
            reporter.ledger.after_step(0.0)
        reporter.log(4, StepResult(0.1, torch.tensor(2.0), torch.tensor(1.0)), REMAINING, rank_seconds)
    records = last_arguments(reporter.metrics.write)
    recorded_seconds = [record["rank_seconds"] for record in records if "rank_seconds" in record]
    assert recorded_seconds == [[1.0, 1.9, 1.0], [1.0, 1.1, 1.0]]
    assert last_arguments(reporter.bar.warn) == ["slowest: rank 1, 1.9 s per step (median 1)", None]


def test_warning_stays_in_plain_lines_until_removed(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(0, 10)
    bar._last_line = float("inf")  # as if a line had just been printed
    bar.show(9, "loss 3")
    bar.show(10, "loss 2")
    bar.warn("checkpoint", "step 8 NOT SAVED")
    bar.show(10, "loss 2")
    bar.warn("slowest rank", "SLOW: rank 1")
    bar.warn("checkpoint", None)
    bar.show(10, "loss 1")
    bar.close()
    lines = capsys.readouterr().err.splitlines()  # the last step is always printed
    assert lines == ["step 10/10  loss 2", "step 10/10  loss 2  step 8 NOT SAVED", "step 10/10  loss 1  SLOW: rank 1"]
