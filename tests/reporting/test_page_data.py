"""Data to download: what the page shows of each run, as JSON, of bounded size."""

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import attrs
import pytest

from evaluation.loss.loss_measures import HELD_OUT
from reporting.page_data import MOST_SAMPLES
from reporting.report_page import report_page
from reporting.run_history import read_history
from reporting.samples.sample_sections import sample_sections
from tests.reporting.samples.sampled import sample
from tests.reporting.written_runs import training, write_run
from training.telemetry.metrics_log import EVALUATIONS, SAMPLES


def loss_result(model: str) -> dict[str, Any]:
    """Return a line of `evaluations.jsonl`."""
    span = {"tokens": "/home/me/tokens/code", "split": "validation", "start": 0, "count": 20, "sha256": "f00d"}
    values = {"nats_per_token": 2.0, "nats_per_token_error": 0.1, "bits_per_byte": 3.0, "bits_per_byte_error": 0.1}
    groups = {"nats": [20.0, 20.0], "tokens": [10, 10], "text_bytes": [10, 10]}
    return {"evaluation": "loss", "model": model, "time": "t", "range": span, "groups": groups, **values}


def page_of(*runs: Path) -> tuple[str, list[dict[str, Any]]]:
    sections, _ = sample_sections(runs, record=False)
    page = report_page(runs, [read_history(run) for run in runs], sections)
    links = page.split("data:application/json;base64,")[1:]
    return page, [json.loads(b64decode(link.split('"')[0])) for link in links]


def test_it_has_curves_samples_log_probabilities_evaluations_and_differences(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, training()) for name in "ab"]
    (runs[0] / SAMPLES).write_text("".join(json.dumps(attrs.asdict(sample(at, 2.0))) + "\n" for at in (4, 8)))
    (runs[0] / EVALUATIONS).write_text(json.dumps(loss_result("a step-00000008")) + "\n")
    (runs[0] / "resolved.json").write_text(json.dumps({"git_commit": "f00d"}))
    page, (first, second) = page_of(*runs)
    assert first["curves"]["train_loss"]["steps"][-1] == 100 and first["axes"].keys() >= {"steps", "dollars"}
    assert [each["step"] for each in first["samples"]] == [4, 8] and first["samples"][0]["said"][0]["text"] == "</dd>4"
    assert [each["nats_per_token"] for each in first["mean_log_probabilities"]] == [-2.0, -2.0]
    [loss, _] = first["evaluations"]
    assert (loss["measure"], loss["value"]) == (HELD_OUT.name, 2.0)
    assert loss["interval"] == pytest.approx([1.804, 2.196], abs=1e-3)
    assert first["differing_settings"] == second["differing_settings"] == {"commit": ["f00d", "unknown"]}
    assert second["samples"] == second["mean_log_probabilities"] == second["evaluations"] == []
    assert "/home/me" not in page


def test_eight_runs_of_a_hundred_checkpoints_make_a_page_below_three_megabytes(tmp_path: Path) -> None:
    text = "def f(x): return x\n" * 27  # 513 bytes
    runs = []
    for number in range(8):
        run = write_run(tmp_path / f"{number}", training(1000))
        lines = (json.dumps(attrs.asdict(sample(at, 2.0, text))) + "\n" for at in range(100, 10_100, 100))
        (run / SAMPLES).write_text("".join(lines))
        runs.append(run)
    page, data = page_of(*runs)
    assert len(page) < 3_000_000
    assert len(data[7]["samples"]) == MOST_SAMPLES and len(data[7]["mean_log_probabilities"]) == 100
    assert len(data[7]["curves"]["train_loss"]["steps"]) <= 2 * 250 + 2
