"""Line charts: every point and event is visible, or the title mentions it; labels are few and round."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import line_chart
from common.line_chart import Line, LineChart, Scale, is_own_png, png, value_range
from tests.conftest import ROOT


def chart(values: list[float], **changes: Any) -> str:
    """Return a chart with a line that has one value per step."""
    line = Line(name="loss", x=np.arange(len(values), dtype=float), y=np.array(values), color=0, dotted=True)
    return LineChart(**({"title": "loss", "axis": "steps", "lines": [line], "columns": 500} | changes)).svg()


def dots(page: str) -> int:
    return sum(path.count("h0") for path in re.findall(r'class="dots s0" d="([^"]*)"', page))


def test_a_point_without_neighbors_is_a_dot() -> None:
    assert dots(chart([3.0])) == 1
    assert dots(chart([*[np.nan] * 50, 3.0, np.nan, *np.ones(50)])) == 1


def test_only_few_points_are_marked() -> None:
    assert dots(chart([2.0, 1.0, 3.0])) == 3
    assert dots(chart([2.0, 1.0] * 50)) == 0


def test_distant_points_are_not_joined() -> None:
    assert re.findall(r'line s0 joined" data-name="loss" d="([MLh \d]*)"', chart([9.0, 3.0, 2.0]))[0].count("L") == 1
    assert chart([2.0, 2.0]).count("L") == chart([9.0, 9.0, 1.0]).count("L") == 1
    image = png([LineChart(title="t", axis="x", lines=[Line(name="a", x=np.ones(1), y=np.ones(1), color=0)])], "one")
    assert len(set(image)) > 1 and image.startswith(b"\x89PNG")


def test_a_logarithmic_x_axis_has_powers_of_ten() -> None:
    line = Line(name="a", x=np.array([1.0, 10.0, 1e5]), y=np.ones(3), color=0)
    page = chart([], lines=[line], logarithmic_x=True)
    assert 'data-log-x="1"' in page and ">100k<" in page and ">1k<" in page


def test_a_chart_of_step_0_has_an_axis_up_to_1() -> None:
    page = chart([0.0])
    assert re.findall(r'<span style="bottom:[\d.]+%">([\d.]+)<', page) == ["0.00", "0.25", "0.50", "0.75", "1.00"]


def test_titles_mention_hidden_values_and_logarithmic_axes() -> None:
    assert "<figcaption>loss (values above 3 are not shown; the largest is 36k)<" in chart(
        [2.0, 3.0, 36_000.0], top=3.0
    )
    assert "<figcaption>loss<" in chart([36_000.0], top=3.0)  # a top that would hide the whole line is ignored
    assert "<figcaption>loss<" in chart([2.0, 3.0], top=3.0)
    assert "<figcaption>loss, logarithmic axis<" in chart([2.0, 3.0], logarithmic=True)


@pytest.mark.parametrize(
    ("values", "expected_range"), [([], (0, 1)), ([0.0], (0, 1)), ([np.nan, 2.0], (1.8, 2.2)), ([3.0, 1.0], (1, 3))]
)
def test_a_range_has_two_different_ends(values: list[float], expected_range: tuple[float, float]) -> None:
    assert value_range([np.array(values)]) == pytest.approx(expected_range)


@pytest.mark.parametrize(("low", "high"), [(1.05, 1.45), (0.9, 30), (1e-6, 1e30), (2, 2.5)])
def test_logarithmic_axes_have_a_few_labels(low: float, high: float) -> None:
    assert 2 <= len(Scale(low, high, logarithmic=True).ticks()) <= 12


def test_the_last_x_label_ends_at_its_position() -> None:
    labels = Scale(0.0, 41.0).labels("left")
    assert labels.count("<span") == 5 and '<span class=last style="left:97.56%">40' in labels


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "TkAgg"])
def test_user_settings_do_not_affect_charts(tmp_path: Path, backend: str) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: black\nlines.linewidth: 9\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import numpy as np; from common.line_chart import *\n"
        "line = Line(name='a', x=np.arange(9.0), y=np.arange(9.0), color=0)\n"
        "sys.stdout.buffer.write(png([LineChart(title='t', axis='x', lines=[line])], 'title'))"
    )
    settings = {"MPLBACKEND": backend, "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    picture = [
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT)], cwd=folder, env=environment | more, capture_output=True, check=True
        ).stdout
        for folder, more in ((tmp_path, settings), (ROOT, dict[str, str]()))
    ]
    assert picture[0] == picture[1] and picture[0].startswith(b"\x89PNG")


def test_the_top_never_hides_a_line() -> None:
    lines = [
        Line(name=str(level), x=np.arange(3.0), y=np.array([level, level + 1, np.nan]), color=0) for level in (1, 90)
    ]
    picture = LineChart(title="loss", axis="steps", lines=lines, top=3.0).svg()
    for path in re.findall(r'class="line [^"]*" data-name="[^"]*" d="([^"]*)"', picture):
        assert any(0 <= int(height) <= 10_000 for height in re.findall(r"[ML]\d+ (-?\d+)", path))


def test_our_charts_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(name="a", x=np.ones(1), y=np.ones(1), color=0)
    ours = LineChart(title="t", axis="x", lines=[line])
    picture = png([ours], "ours")
    assert is_own_png(picture)
    monkeypatch.setattr(line_chart, "WIDTH", 6)  # pictures are still recognized if their size changes
    assert is_own_png(png([ours], "ours"))
    unnamed = picture.replace(b"Source\0Lockstep", b"Source\0nothing.")  # earlier versions named no source
    assert unnamed != picture
    for width, height, is_own in ((990, 550, True), (990, 880, True), (660, 550, False), (990, 551, False)):
        sized = unnamed[:16] + struct.pack(">II", width, height) + unnamed[24:]
        assert is_own_png(sized) == is_own
        assert not is_own_png(sized.replace(b"Matplotlib", b"Photograph"))
    assert not is_own_png(b"a user's notes") and not is_own_png(b"")
