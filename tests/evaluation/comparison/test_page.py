"""A comparison in a report, as Markdown, and in a terminal."""

import shutil
from pathlib import Path

from evaluation.comparison.compare import Cell, Comparison, as_fragment, as_markdown
from tests.evaluation.comparison.stored import compared, kept


def test_a_terminal_shows_whole_models_side_by_side_as_many_as_fit(runs: dict[str, Path], tmp_path: Path) -> None:
    far = tmp_path / ("a-long-name-" * 6)
    shutil.copytree(runs["long"], far, symlinks=True)
    shown = compared(*runs.values(), far, environment={"COLUMNS": "80"})
    assert max(map(len, shown.splitlines())) <= 80 + len(str(far))  # a path is not broken
    tables, _, _ = shown.partition("held-out loss: ")
    assert max(map(len, tables.splitlines())) <= 80
    rows = [line for line in tables.splitlines() if line.startswith("held-out loss")]
    assert len(rows) > 1
    for home in runs.values():
        assert sum(f"{kept(home)['nats_per_token']:.4f} ±" in row for row in rows) >= 1


def test_intervals_of_a_column_are_drawn_on_one_scale() -> None:
    rows = [
        [Cell(text="a"), Cell(text="1", value=1.0, bounds=(0.0, 2.0)), Cell(text="7")],
        [Cell(text="b"), Cell(text="3", value=3.0, bounds=(2.0, 4.0)), Cell()],
    ]
    page = as_fragment(Comparison(columns=["model", "x", "y"], rows=rows, statements=["a < b"], notes=[]))
    assert '<td>1<svg width="96" height="12" role="img" aria-label="95 % interval"><line x1="4.0" x2="48.0"' in page
    assert '<line x1="48.0" x2="92.0" y1="6.0" y2="6.0"/><circle cx="70.0" cy="6.0" r="3"/></svg></td><td></td>' in page
    assert "<td>range of the bars (95 % intervals)</td><td>0 to 4</td><td></td>" in page
    assert "<li>a &lt; b</li>" in page and page.count("<ul") == 1


def test_markdown_ends_no_cell_and_begins_no_tag() -> None:
    found = Comparison(columns=["model"], rows=[[Cell(text="a|b <i>")]], statements=[], notes=["x|y"])
    assert "a\\|b \\<i>" in as_markdown(found) and "- x\\|y" in as_markdown(found)
