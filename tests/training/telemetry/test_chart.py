"""The chart is drawn from the metrics in a separate process, and its failure never harms the run."""

import sys
import time
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import MakeRun, complete
from tests.launch import DRAW_CHART
from training.telemetry import chart
from training.telemetry.chart import CHART, FAILED_SECONDS, LEAST_SECONDS, BackgroundChart, draw_chart
from training.telemetry.metrics_log import METRICS, MetricsLog


def test_chart_is_drawn_from_the_metrics(make_run: MakeRun) -> None:
    run = make_run()
    log = MetricsLog(run)
    log.write({"event": "start", "step": 0})
    for step in range(1, 200):
        log.write({"step": step, "train_loss": 5 / step, "learning_rate": 1e-3, "grad_norm": 1.0})
    for step, loss in ((100, 2.0), (199, 1.0)):
        log.write({"step": step, "validation_loss": loss, "validation_losses": {"a": loss, "_$b$_^": loss + 1}})
    log.close()
    drawing = BackgroundChart(run)
    drawing.redraw()  # has no effect so soon after the start
    assert drawing._process is None
    drawing._began -= LEAST_SECONDS
    drawing.redraw()
    assert drawing._process is not None and drawing._process.wait(60) == 0
    assert (run / "training-run-chart.png").stat().st_size > 10_000


def test_failed_drawing_is_tried_again_later(make_run: MakeRun) -> None:
    run = make_run()
    (run / CHART).mkdir()
    drawing = BackgroundChart(run)
    drawing._began -= LEAST_SECONDS
    drawing.redraw()
    failed = drawing._process
    assert failed is not None and failed.wait(60) == 1
    (run / CHART).rmdir()
    drawing._began -= LEAST_SECONDS
    drawing.redraw()
    assert drawing._process is failed
    drawing._began -= FAILED_SECONDS
    drawing.redraw()
    assert drawing._process is not failed and drawing._process.wait(60) == 0


def test_chart_that_cannot_be_drawn_is_not_mentioned(make_run: MakeRun) -> None:
    run = make_run("run $x$ 100%", min_train_tokens=256, validation_interval=None)
    (run / CHART).mkdir()
    done = complete(run, environment={DRAW_CHART: "1"})
    assert f"WARNING: {run / CHART}: cannot be written: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert ", no chart\n" in done.stdout
    (run / CHART).rmdir()
    assert draw_chart(run) == run / CHART
    (run / METRICS).unlink()
    (run / METRICS).mkdir()
    with pytest.raises(BadInput, match="cannot be read"):
        draw_chart(run)


def test_hanging_chart_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert BackgroundChart(tmp_path).finish() is False  # because this Python does not exist
    python.write_text('#!/bin/sh\nenv > "$0.env"\nexec sleep 600\n')
    python.chmod(0o755)
    monkeypatch.setattr(chart, "LAST_SECONDS", 0.1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    drawing = BackgroundChart(tmp_path)
    assert drawing.finish() is False and drawing.finish() is False
    assert drawing._process is not None and drawing._process.poll() is None
    while not (variables := (tmp_path / "python.env").read_text().splitlines()):
        time.sleep(0.01)
    drawing._process.kill()
    drawing._process.wait()
    names = {line.partition("=")[0] for line in variables}
    assert "PATH" in names and not {"RANK", "WORLD_SIZE"} & names


def test_a_users_picture_is_not_replaced(make_run: MakeRun) -> None:
    run = make_run()
    (run / CHART).write_bytes(b"a picture of the user")
    with pytest.raises(
        BadInput, match=r"is not a chart of train.py, so it was not overwritten \(21 bytes\); move it away"
    ):
        draw_chart(run)
    assert (run / CHART).read_bytes() == b"a picture of the user"
