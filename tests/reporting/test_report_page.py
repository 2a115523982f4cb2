"""The page of a report needs no other file, escapes names, and works in any browser, with and without its script."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from markupsafe import Markup

from common.errors import BadInput
from common.files import replace_file
from evaluation.loss.loss_measures import HELD_OUT
from reporting.command import ReportCommand
from reporting.command import run as report
from reporting.report_page import experiment_results, ledger_rows, report_page
from reporting.run_history import read_history
from reporting.samples.sample_log import Said
from reporting.samples.sample_sections import gallery, heat_map, sample_sections
from tests.reporting.samples.sampled import sample
from tests.reporting.written_runs import start, step, training, write_resolved, write_run
from training.telemetry.curves import Curve
from training.telemetry.metrics_log import EVALUATIONS, SAMPLES

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = '<script>alert(1)<"$é'
LONG = "speedrun-qwen3-8xh100-learning-rate-0.01-warmup-10-seed-"
LIMIT = 3_000_000  # bytes of a page
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


def _page(*runs: Path) -> str:
    return report_page(runs, [read_history(run) for run in runs], {})


def test_names_are_escaped_and_commands_are_quoted(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, training()) for name in ("one", "two", HOSTILE)]
    (runs[0] / EVALUATIONS).write_text("{}\n")
    page = _page(*runs)
    assert "<script>alert" not in page and "<i>loss" not in page
    assert f"To measure the held-out loss: python evaluate.py loss {runs[1]} &#39;/" in page


def _sampled(names: Sequence[str], checkpoints: int) -> dict[str, Markup]:
    """Return the report's sections on samples, for runs with these names. The texts are as long as real ones."""
    prompts = [f"Prompt {number}" for number in range(6)]
    answers = [
        Said(prompt=prompt, temperature=way, text="word " * 8 + " " * 20) for prompt in prompts for way in (0, 1)
    ]
    texts = "held-out text & <b>\n" * 26
    samples = [sample(100 * at, 3.0 + 2 / at, text=texts, said=answers) for at in range(1, checkpoints + 1)]
    runs = [(name, samples) for name in names]
    parts = {"Samples": gallery(runs), "Log-probabilities": heat_map(runs)}
    return {title: html for title, html in parts.items() if html}


def test_time_table_has_each_part_and_the_total(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", training())
    history = read_history(run)
    assert list(ledger_rows(history)) == [
        ("compile", "4s", "$0.0022", 0.04),
        ("training", "1m30s", "$0.0500", 0.9),
        ("lost", "6s", "$0.0033", 0.06),
        ("total", "1m40s", "$0.0556", 1.0),
    ]
    assert '"lost" is the total time of jobs that were killed' in report_page([run], [history], {})
    rows = list(ledger_rows(attrs.evolve(history, ledger={"training": 10.0, "lost": -5.0}, ledger_usd=None)))
    assert [(time, usd, share) for _, time, usd, share in rows] == [("10s", "", 1), ("-5s", "", 0), ("5s", "", 0.5)]
    page = _page(write_run(tmp_path / "killed", [start(), step(10)]))
    assert "<span>killed</span>" in page and "a job that is killed does not" in page and "has ended yet" not in page


@pytest.mark.slow
def test_the_largest_page_is_below_its_size_limit(tmp_path: Path) -> None:
    steps = np.arange(1.0, 100_001.0)
    noise = np.random.default_rng(0).normal(size=len(steps))
    run = read_history(write_run(tmp_path / "run", training(10)))
    names = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
    curves = {name: Curve(steps, 3 + 2 * np.exp(-steps / 9000) + noise / 10) for name in names}
    curves["validation_loss"] = Curve(steps[99::100], curves["train_loss"].values[99::100])
    axes = {name: Curve(steps, steps * 20_480) for name in run.axes}
    histories = [attrs.evolve(run, name=f"{LONG}{at}", curves=curves, axes=axes) for at in range(8)]
    page = report_page([tmp_path / "run"] * 8, histories, _sampled([history.name for history in histories], 100))
    assert len(page.encode()) < 0.8 * LIMIT


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.json", ".", "pipe"])
def test_report_never_replaces_another_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda _: None)
    run = write_run(tmp_path / "run", training())
    os.mkfifo(run / "pipe")
    report(ReportCommand(runs=(run,), no_samples=True))
    report(ReportCommand(runs=(run,), no_samples=True))
    with pytest.raises(BadInput, match="--output"):
        report(ReportCommand(runs=(run,), output=run / name, no_samples=True))


def loss_result(model: str) -> dict[str, Any]:
    """Return a line of `evaluations.jsonl`."""
    span = {"tokens": "/home/me/tokens/code", "split": "validation", "start": 0, "count": 20, "sha256": "f00d"}
    values = {"nats_per_token": 2.0, "nats_per_token_error": 0.1, "bits_per_byte": 3.0, "bits_per_byte_error": 0.1}
    groups = {"nats": [20.0, 20.0], "tokens": [10, 10], "text_bytes": [10, 10]}
    return {"evaluation": "loss", "model": model, "time": "t", "range": span, "groups": groups, **values}


def test_the_page_has_all_its_sections(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, training()) for name in "ab"]
    (runs[0] / SAMPLES).write_text("".join(json.dumps(attrs.asdict(sample(at, 2.0))) + "\n" for at in (4, 8)))
    (runs[0] / EVALUATIONS).write_text(json.dumps(loss_result("a step-00000008")) + "\n")
    write_resolved(runs[0], git_commit="f00d")
    write_resolved(runs[1])
    sections, _ = sample_sections(runs, record=False)
    page = report_page(runs, [read_history(run) for run in runs], sections)
    assert "<h2>Samples</h2>" in page and "<h2>Log-probabilities</h2>" in page
    assert "<td>commit</td><td>f00d</td><td>unknown</td>" in page
    assert HELD_OUT.name in page and "2.0000 ± 0.1000" in page
    assert "/home/me" not in page


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
@pytest.mark.parametrize("count", [1, 8])
def test_a_browser_shows_the_page_everywhere(tmp_path: Path, count: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    runs = [write_run(tmp_path / f"{LONG}{number}-{HOSTILE}", training()) for number in range(count)]
    file = tmp_path / "report.html"
    histories = [read_history(run) for run in runs]
    file.write_text(report_page(runs, histories, _sampled([history.name for history in histories], 3)))
    assert file.stat().st_size < LIMIT
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        messages: list[str] = []
        for script in (True, False):
            page = browser.new_page(viewport={"width": 360, "height": 740}, java_script_enabled=script)
            page.on("console", lambda message: messages.append(message.text))
            page.on("pageerror", lambda error: messages.append(str(error)))
            page.on("request", lambda request: messages.append(request.url))
            page.goto(file.as_uri())
            assert page.locator(".along-steps").is_visible()
            assert page.locator(".gallery dd").first.bounding_box()["width"] > 300
            if script:
                page.locator(".along-steps svg").first.hover(position={"x": 180, "y": 50})
                description = page.locator(".along-steps .values").first.inner_text()
                assert ("training loss, average: " in description and "validation loss at 50: 3.1" in description) == (
                    count == 1
                )
                colors, cell = set(), page.locator(".heat > .text > span").nth(2)
                for view in (0, 1):
                    page.locator(f"label[for=heat-{view}]").click()
                    colors.add(cell.evaluate("element => getComputedStyle(element).backgroundColor"))
                    shown = [legend.is_visible() for legend in page.locator(".heat > .legend").all()]
                    assert shown == [view == 0, view == 1]
                cell.hover()
                description = cell.evaluate("element => getComputedStyle(element, '::after').content")
                assert len(colors) == 2 and "-3.67 nats, 2.6%" in description and "difference +" in description
            page.check("#axis-dollars")
            assert page.locator(".along-dollars").is_visible()
            assert not page.locator(".along-steps").is_visible()
            if script:
                for media, scheme in (("screen", "light"), ("screen", "dark"), ("print", "light")):
                    page.emulate_media(media=media, color_scheme=scheme)
                    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                    assert page.evaluate(wide) <= 0, (media, scheme)
        browser.close()
    assert messages == [file.as_uri()] * 2


def write_results(directory: Path, name: str, record: Any) -> str:
    (directory / f"{name}.json").write_text(json.dumps(record))
    (directory / f"{name}.md").write_text("# <i>words</i>")
    return str(experiment_results(directory) or "")


def test_results_of_every_experiment_are_drawn(tmp_path: Path) -> None:
    page = write_results(tmp_path, "sweep", {"variants": VARIANTS})
    assert page.count("<circle") == 2 and "no difference found" in page
    assert "&lt;b&gt;" in page and "# &lt;i&gt;words" in page and "<b>" not in page
    (tmp_path / "sweep.json").unlink()
    trial = {"text": "worse", "columns": ["side"], "variants": VARIANTS[:2]}  # the page shows trial.md, not this text
    page = write_results(tmp_path, "trial", trial)
    assert "<th>side</th>" in page and "# &lt;i&gt;words" in page and "the base" in page
    (tmp_path / "trial.json").unlink()
    page = write_results(tmp_path, "ladder", LADDER)
    assert page.count('class="dots') == 3 and page.count('data-name="law, ') == 3 and "forecast, 90%" in page
    page = write_results(tmp_path, "ladder", LADDER | {"law": None, "target": None})
    assert page.count('class="dots') == 2 and 'data-name="law' not in page


def test_a_missing_sweep_table_names_its_command(tmp_path: Path) -> None:
    (tmp_path / "account.jsonl").touch()
    assert "--collect" in (experiment_results(tmp_path) or "")
    assert experiment_results(tmp_path / "absent") is None


@pytest.mark.parametrize("record", [{}, {"variants": 3}, {"variants": [{"name": "a"}]}, {"variants": [VARIANTS[0], 3]}])
def test_errors_name_a_damaged_result(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"sweep.json: .*; damaged or edited; rerun the experiment"):
        write_results(tmp_path, "sweep", record)
    with pytest.raises(BadInput, match=r"ladder.json: .*; damaged or edited; rerun the experiment"):
        (tmp_path / "sweep.json").unlink()
        write_results(tmp_path, "ladder", record)


def test_invalid_unicode_is_escaped(tmp_path: Path) -> None:
    records = [start(), step(1), {"event": "stopped", "step": 1, "reason": "half a surrogate \ud83d"}]
    run = write_run(tmp_path / "run", records)
    replace_file(tmp_path / "page.html", _page(run))
    assert "half a surrogate \\ud83d" in (tmp_path / "page.html").read_text()
