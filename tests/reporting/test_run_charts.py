"""Charts of runs: every run is visible; lines, axes and events have names; and outliers do not flatten curves."""

import re
from pathlib import Path

import attrs
import numpy as np
import pytest

from reporting.report_page import differing_settings
from reporting.run_charts import charted_axes, common_top, grouped, legend
from reporting.run_history import RunHistory, read_history
from tests.reporting.written_runs import start, step, training, write_resolved, write_run
from training.telemetry.curves import Curve

STEPS = np.arange(1, 100_001, dtype=float)
FALLING = 2 + 3 * np.exp(-STEPS / 20_000)


def curve(values: np.ndarray) -> Curve:
    return Curve(STEPS[: len(values)], values)


def titles(charts: list[str]) -> list[str]:
    return [re.findall(r"<figcaption>(.*)</figcaption>", chart)[0] for chart in charts]


def test_events_after_the_last_step_are_inside_charts(tmp_path: Path) -> None:
    end = {"event": "diverged", "step": 19, "problem": "loss", "elapsed_seconds": 19.0}
    history = read_history(write_run(tmp_path / "run", [start(), *map(step, range(1, 10)), end]))
    axes = charted_axes([history])
    assert [axis.unit for axis in axes] == ["steps", "tokens", "minutes", "dollars"]
    for chart in [chart for axis in axes for chart in axis.charts]:
        [place] = re.findall(r'class="mark diverged" d="M(\d+) 0V', chart)
        assert 9800 < int(place) < 10_000


def test_very_different_learning_rates_share_a_logarithmic_axis(tmp_path: Path) -> None:
    names = {"one": 1e-3, "two": 5e-3, "wild": 1000.0}
    runs = [
        write_run(tmp_path / name, [start(), *(step(at, learning_rate=rate) for at in range(1, 50))])
        for name, rate in names.items()
    ]
    histories = [read_history(run) for run in runs]
    assert "learning rate, logarithmic axis" in titles(charted_axes(histories)[0].charts)
    assert "learning rate" in titles(charted_axes(histories[:2])[0].charts)


def test_averages_and_logged_values_look_different(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run", training()))
    loss, _, norm, *_ = charted_axes([history])[0].charts
    names = re.findall(r'data-name="([^"]*)"', loss)
    assert names == ["training loss, as logged", "training loss, average", "validation loss"]
    assert "gradient norm, before clipping, as logged" in norm
    assert legend([history])[-1][1] == "thick: moving average; thin: as logged"
    several = [history] * 3
    losses = ["training loss, nats per token, moving average", "validation loss, nats per token"]
    assert titles(charted_axes(several)[0].charts)[:2] == losses
    assert [text for _, text in legend(several)] == ["run"] * 3


def test_lines_of_more_runs_have_fewer_points(tmp_path: Path) -> None:
    records = [start(), *(step(at, float(np.sin(at))) for at in range(1, 3000))]
    history = read_history(write_run(tmp_path / "run", records))
    for count, points in ((1, 2 * 500 + 2), (8, 2 * 250 + 2)):
        charts = charted_axes([history] * count)[0].charts
        lines = re.findall(r'class="line [^"]*" data-name="[^"]*" d="([^"]*)"', "".join(charts))
        assert points - 20 <= max(map(lambda line: line.count("L") + 1, lines)) <= points


def test_many_runs_share_colors_by_recipe(
    tmp_path: Path,
) -> None:
    run = read_history(write_run(tmp_path / "run", training()))
    curve = run.curves["validation_loss"]

    def history(rate: float, seed: int) -> RunHistory:
        curves = run.curves | {"validation_loss": attrs.evolve(curve, values=curve.values * (1 + rate))}
        train = run.train.replace(learning_rate=rate, random_seed=seed)
        return attrs.evolve(run, name=f"rate={rate}-seed-{seed}", train=train, curves=curves)

    nine = [history(rate, seed) for rate in (0.2, 0.1, 0.3) for seed in (1, 2, 3)]
    assert grouped(nine) == [("rate=0.1", [3, 4, 5]), ("rate=0.2", [0, 1, 2]), ("rate=0.3", [6, 7, 8])]
    forty = grouped([history(rate / 100, 1) for rate in range(40, 0, -1)])
    assert [name for name, _ in forty][::7] == ["rate=0.01", "33 others"] and len(forty[-1][1]) == 33
    page = "".join(charted_axes(nine)[0].charts)
    assert page.count('data-name="rate=0.1-seed-') and 'class="line s8' not in page


def test_different_tokenizers_never_share_nats_per_token(tmp_path: Path) -> None:
    several = []
    for name, size, bits in (("gpt2", 50257, 0.3), ("bpe", 4096, 0.5)):
        tokenizer = {"name": name, "vocabulary_size": size, "end_of_text_id": 0, "ranks_file": None}
        history = read_history(write_resolved(write_run(tmp_path / name, training()), tokenizer=tokenizer))
        several.append(attrs.evolve(history, name="run", bits_per_nat=bits))
    charts = charted_axes(several)[0].charts
    assert titles(charts)[0] == "training loss, bits per byte of text (the tokenizers differ)"
    assert "validation loss, bits per byte" in titles(charts)[1] and "run ends at 1.55" in charts[1]
    apart = titles(charted_axes([several[0], attrs.evolve(several[1], bits_per_nat=None)])[0].charts)
    assert len([title for title in apart if "(not comparable with other tokenizers" in title]) == 4
    assert "validation loss, nats per token of bpe (4,096 ids)" in apart[3]
    assert differing_settings(several)[0][2] == ["gpt2", "bpe"]


def test_spikes_and_first_losses_do_not_flatten_a_curve() -> None:
    for values in (np.where(STEPS == 60_000, 30.0, FALLING), np.where(STEPS < 1000, 11.0, FALLING)):
        top = common_top([curve(values)], losses=True)
        assert 4 < top < 5
    assert common_top([curve(FALLING)], losses=True) == common_top([curve(FALLING[::-1])], losses=True) == np.inf


def test_one_bad_run_does_not_flatten_the_rest() -> None:
    bad = curve(np.array([5.0, 36_000.0]))
    top = common_top([curve(FALLING), bad], losses=True)
    assert top < 6
    assert common_top([curve(FALLING), curve(3 * FALLING)], losses=True) == np.inf
    assert common_top([bad], losses=True) == np.inf
    begins_well = curve(np.array([5.5] * 50 + [36_000.0] * 50))
    assert common_top([curve(FALLING), begins_well], losses=True) < 6


def test_a_moving_average_skips_gaps() -> None:
    values = curve(np.array([1.0, np.nan, 3.0, 5.0])).smoothed()
    assert np.isnan(values[1]) and values[[0, 2, 3]].tolist() == [2.0, 3.0, 4.0]


def visible(values: np.ndarray, top: float) -> float:
    """Return the share of a run's finite values that a chart shows."""
    finite = values[np.isfinite(values)]
    return float((finite <= top).mean())


@pytest.mark.parametrize(
    "levels",
    [(2.5, 0.3), (0.3, 2.5), (9.0, 0.3, 0.2), (900.0, 0.3), (3.0,) * 2, (-1.0, -40.0), (40.0, -3.0), (1.0, 9.0, 80.0)],
    ids=str,
)
def test_outlier_rules_never_hide_a_run(levels: tuple[float, ...]) -> None:
    runs = [curve(level + np.linspace(0.1, 0.0, 60)) for level in levels]
    top = common_top(runs, losses=True)
    assert min(visible(run.values, top) for run in runs) >= 0.25
    holes = [Curve(run.steps, np.where(run.steps % 3 == 0, np.nan, run.values)) for run in runs]
    holes[0].values[:2] = np.inf
    assert min(visible(run.values, common_top(holes, losses=True)) for run in holes) >= 0.25


def test_a_lone_run_with_huge_first_losses_is_visible() -> None:
    for count in (1, 2, 3, 12, 100):
        values = np.append(1e6, np.full(count - 1, 3.0))
        assert visible(values, common_top([curve(values)], losses=True)) > 0


def test_averages_above_the_logged_values_are_visible(tmp_path: Path) -> None:
    spiky = [start(), *(step(at, 1000.0 if at % 3 == 0 else 1.0) for at in range(1, 90))]
    plain = [start(), *(step(at, 1.0) for at in range(1, 90))]
    names = ("spiky", "plain", "other")
    runs = [write_run(tmp_path / name, records) for name, records in zip(names, (spiky, plain, plain), strict=True)]
    chart = charted_axes([read_history(run) for run in runs])[0].charts[0]
    [path] = re.findall(r'data-name="spiky" d="([^"]*)"', chart)
    heights = [int(height) for height in re.findall(r"[ML]-?\d+ (-?\d+)", path)]
    assert any(0 <= height <= 10_000 for height in heights)


def test_a_run_without_positive_values_stays_in_its_chart(tmp_path: Path) -> None:
    names = {"still": 0.0, "slow": 1e-3, "wild": 1.0}
    runs = [
        write_run(tmp_path / name, [start(), *(step(at, learning_rate=rate, grad_norm=rate) for at in range(1, 50))])
        for name, rate in names.items()
    ]
    for chart in charted_axes([read_history(run) for run in runs])[0].charts:
        assert set(re.findall(r'data-name="([^"]*)" d="M', chart)) == set(names)
