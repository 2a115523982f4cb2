"""The results of a ladder. The losses in its run directories are computed with a known law."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import BadInput
from experiments.ladder.ladder_file import read_ladder
from experiments.ladder.ladder_table import LadderTable, check_records, conclude, tuning_runs
from experiments.ladder.trunk import describe_plan, size_trunks
from experiments.shared.experiment_files import write_run_directory
from model.counts import matmul_parameter_count
from tests.conftest import MakeRun
from tests.experiments.conftest import MakeLadder
from training.planning.forecast_file import describe_forecast_file

Law = Callable[[float, float], float]
INSIDE = {0.005: 3.1, 0.01: 3.0, 0.02: 3.2}


def clean(parameters: float, tokens: float) -> float:
    return float(1.5 + 9 / parameters**0.3 + 20 / tokens**0.35)


def concluded(
    file: Path, output: Path, loss_law: Law, rates: dict[float, float], usd: float | None = None
) -> LadderTable:
    ladder = read_ladder(file, output)
    trunks = size_trunks(ladder, 0.01)
    for trunk in trunks:
        for horizon in trunk.horizons:
            write_run_directory(horizon.directory, horizon.sections)
            loss = loss_law(matmul_parameter_count(trunk.size), horizon.plan.train_tokens)
            loss *= 1 + 0.004 * ((trunks.index(trunk) + trunk.horizons.index(horizon)) % len(ladder.seeds))
            line = {"step": horizon.plan.steps, "validation_loss": loss}
            (horizon.directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    table = conclude(ladder, rates, trunks, usd)
    output.mkdir(exist_ok=True)
    table.show()
    return table


@pytest.fixture(name="file")
def _file(make_ladder: MakeLadder) -> Path:
    return make_ladder(tokens_per_parameter=[5, 10, 20])


def test_plan_shows_the_forecast_of_a_clean_ladder(file: Path, tmp_path: Path) -> None:
    table = concluded(file, tmp_path / "out", clean, INSIDE, usd=0.001)
    assert table.refused is None and "not enough for the start-up of any machine" in table.text()
    target = table.forecast.run
    assert table.forecast.loss.value == pytest.approx(clean(table.forecast.parameters, table.forecast.tokens), rel=0.02)
    assert f"forecast     loss {table.forecast.loss.value:.4f}" in describe_forecast_file(target)[0]
    assert "held out: predicted" in table.text()


def test_the_table_and_the_check_average_over_seeds(make_ladder: MakeLadder, tmp_path: Path) -> None:
    table = concluded(make_ladder(tokens_per_parameter=[5, 10, 20], seeds=3), tmp_path / "out", clean, INSIDE)
    assert table.refused is None and len(table.forecast.fit.points) == 36
    held_out = table.forecast.held_out
    expected = [clean(point.parameters, point.tokens) * 1.004 for point in held_out.points]
    assert [point.loss for point in held_out.points] == pytest.approx(expected)
    assert 0.0025 < table.forecast.fit.noise < 0.006  # the seeds' losses are 0.4% apart
    assert "means over the seeds 42, 43, 44" in table.text()
    largest = held_out.points[-1]
    assert f"{largest.rung} on {largest.tokens:,} tokens, held out" in table.text()
    assert table.text().count("\n1x8 ") == 3


def test_a_warm_up_without_room_for_decay_is_refused(
    make_ladder: MakeLadder, make_run: MakeRun, tmp_path: Path
) -> None:
    warm = {"warmup_period_percent": 85, "schedule_learning_rate": "cosine"}
    ladder = read_ladder(make_ladder(target=make_run("warm", min_train_tokens=20_000, **warm)))
    with pytest.raises(BadInput, match="decay_period_percent: got 20, wanted at most 15"):
        describe_plan(ladder, None)


def test_a_refused_ladder_keeps_all_points(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    concluded(file, output, clean, INSIDE)
    missed = lambda size, tokens: clean(size, tokens) * (1.1 if size > 8000 else 1)  # noqa: E731
    table = concluded(file, output, missed, INSIDE, usd=40)
    assert table.refused is not None and "held-out" in table.refused
    assert table.text().count("held out: predicted") == 1 and "held out: predicted" not in table.refused
    assert "for $40.00   without a forecast, there is no best size" in table.text()
    assert "but the ladder assumes 0.0" in table.text() and "forecast assumes" not in table.text()
    assert len(json.loads((output / "ladder.json").read_text())["points"]) == 12
    assert describe_forecast_file(table.ladder.target) == []  # the earlier forecast was removed


def test_notes_compare_the_target_with_the_rule(
    file: Path, make_ladder: MakeLadder, make_run: MakeRun, tmp_path: Path
) -> None:
    notes = "\n".join(concluded(file, tmp_path / "out", clean, INSIDE).notes())
    assert "For the target: learning_rate 0.00" in notes and "batch 8 sequences" in notes
    assert "learning_rate is 0.01, but the forecast assumes 0.00" in notes
    assert 'schedule_learning_rate is "cosine", but the forecast assumes "warmup_stable_decay"' in notes
    rules = {"learning_rate": 0.0045, "schedule_learning_rate": "warmup_stable_decay"}
    file = make_ladder(target=make_run("follower", min_train_tokens=20_000, **rules), tokens_per_parameter=[5, 10, 20])
    assert "WARNING" not in "\n".join(concluded(file, tmp_path / "other", clean, INSIDE).notes())


def test_rates_are_compared_on_the_same_tokens(file: Path, tmp_path: Path) -> None:
    ladder = read_ladder(file, tmp_path / "out")
    runs = tuning_runs(ladder, INSIDE)
    assert len(set(runs)) == len(INSIDE)
    for number, run in enumerate(runs):
        run.mkdir(parents=True)
        stream = {"directory": "tokens", "tokens": 100, "files": ["a"], "sha256": [str(min(1, number)) * 64]}
        record = {"train_stream": stream, "validation_stream": stream, "numerics": {"precision": "fp32", "torch": "2"}}
        (run / "resolved.json").write_text(json.dumps(record))
    assert check_records(runs[1:]) == []
    with pytest.raises(BadInput, match=r"tokens, sha256 111111111111', but .* has '100 tokens, sha256 000000000000'"):
        check_records(runs)
