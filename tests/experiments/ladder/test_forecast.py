"""The forecast for a target run: the printed lines, and the file that --plan reads."""

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from forecast_coverage import BESIROGLU

from experiments.ladder.forecast import Forecast, write_forecast
from experiments.ladder.loss_law import LossPoint, fit_law, hold_out_largest
from model.counts import matmul_parameter_count
from tests.conftest import ROOT
from training.config.train_config import load_run
from training.hardware.environment import git_commit
from training.planning.forecast_file import FORECAST, forecast_recipe

LADDER_WIDTHS = (256, 384, 512, 640)


@pytest.fixture(name="forecast", scope="module")
def _forecast() -> Forecast:
    run = load_run(ROOT / "runs" / "speedrun-8xh100", [])
    generator, points = np.random.default_rng(1), []
    for width in LADDER_WIDTHS:
        size = matmul_parameter_count(attrs.evolve(run.model, emb_dim=width, n_heads=width // 64, n_layers=width // 64))
        for ratio in (5, 10, 20):
            loss = BESIROGLU(size, ratio * size) * (1 + 0.002 * generator.standard_normal())
            points.append(LossPoint(rung=f"{width} wide", parameters=size, tokens=ratio * size, loss=loss))
    return Forecast.of(run, fit_law(points), hold_out_largest(points))


def test_a_forecast_uses_the_targets_size_and_tokens(forecast: Forecast) -> None:
    assert forecast.tokens == 2_400_190_464
    assert forecast.parameters == 12 * 12 * 768**2 + 50257 * 768
    largest = max(forecast.fit.points, key=lambda point: point.parameters * point.tokens)
    ratio = forecast.parameters * forecast.tokens / (largest.parameters * largest.tokens)
    assert forecast.extrapolation == pytest.approx(ratio)
    assert forecast.loss.value == pytest.approx(BESIROGLU(forecast.parameters, forecast.tokens), rel=0.01)


def test_lines_have_the_law_check_and_distance(forecast: Forecast) -> None:
    lines = forecast.lines()
    assert f"forecast     loss {forecast.loss.text(4)}, with the 90% interval for a single run" in lines
    assert any("2.24 x the compute of its ladder's largest run; 12 runs of 4 sizes" in line for line in lines)
    far = load_run(ROOT / "runs" / "speedrun-8xh100", ["min_train_tokens=80000000000"])
    lines = Forecast.of(far, forecast.fit, forecast.held_out).lines()
    assert any("(intervals were tested up to 30 x)" in line for line in lines)


def test_the_record_has_law_points_check_and_recipe(forecast: Forecast, tmp_path: Path) -> None:
    write_forecast(tmp_path, forecast)
    record = json.loads((tmp_path / FORECAST).read_text())
    assert record["commit"] == git_commit() and record["recipe"] == forecast_recipe(forecast.run)
    assert [LossPoint(**point) for point in record["points"]] == list(forecast.fit.points)
    assert record["target"]["low"] < record["target"]["loss"] < record["target"]["high"]
    assert record["held_out"]["error"] == forecast.held_out.error and len(record["held_out"]["points"]) == 3
