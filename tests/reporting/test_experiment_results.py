"""Results of experiments on a page: intervals of a sweep, points and law of a ladder."""

import json
from pathlib import Path
from typing import Any

from reporting.experiment_results import experiment_results

VARIANTS = [
    {"name": "base", "mean": 2.0, "difference": None, "verdict": "the base"},
    {"name": "<b>", "mean": 1.9, "difference": [-0.1, -0.15, -0.05], "verdict": "no difference found"},
    {"name": "diverged", "mean": None, "difference": None, "verdict": "diverged"},
]
LAW = {"floor": 1.0, "size_factor": 10.0, "alpha": 0.3, "token_factor": 10.0, "beta": 0.3, "noise": 0.01}
POINTS = [
    {"rung": rung, "parameters": size, "tokens": tokens, "loss": 2.0, "seed": 1}
    for rung, size in (("1x8", 1000), ("1x16", 4000))
    for tokens in (20_000, 40_000)
]
TARGET = {"parameters": 9000, "tokens": 90_000, "loss": 1.9, "low": 1.8, "high": 2.0}
LADDER = {"points": POINTS, "law": LAW, "target": TARGET}


def written(directory: Path, name: str, record: Any) -> str:
    (directory / f"{name}.json").write_text(json.dumps(record))
    (directory / f"{name}.md").write_text("# <i>words</i>")
    return str(experiment_results(directory) or "")


def test_a_sweep_has_an_interval_for_each_compared_variant_and_a_ladder_points_law_and_forecast(tmp_path: Path) -> None:
    page = written(tmp_path, "sweep", {"variants": VARIANTS})
    assert page.count("<circle") == 2 and "no difference found" in page
    assert "&lt;b&gt;" in page and "# &lt;i&gt;words" in page and "<b>" not in page
    (tmp_path / "sweep.json").unlink()
    trial = {"text": "worse", "columns": ["side"], "variants": VARIANTS[:2]}  # its text is no part of the page's
    page = written(tmp_path, "trial", trial)
    assert "<th>side</th>" in page and "# &lt;i&gt;words" in page and "the base" in page
    (tmp_path / "trial.json").unlink()
    page = written(tmp_path, "ladder", LADDER)
    assert page.count('class="dots') == 3 and page.count('data-name="law, ') == 3 and "forecast, 90 %" in page
    page = written(tmp_path, "ladder", LADDER | {"law": None, "target": None})
    assert page.count('class="dots') == 2 and 'data-name="law' not in page


def test_a_sweep_without_its_table_names_the_command_that_writes_it(tmp_path: Path) -> None:
    (tmp_path / "account.jsonl").touch()
    assert "--collect" in (experiment_results(tmp_path) or "")
    assert experiment_results(tmp_path / "absent") is None
