"""Page of a report stands alone, shows names as text, and works in a browser on any screen, with and without script."""

import json
import os
import re
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from markupsafe import Markup

from common.errors import BadInput
from evaluation.loss.loss_measures import HELD_OUT
from reporting.command import ReportCommand
from reporting.page_data import MOST_SAMPLES
from reporting.report_page import LedgerPart, ledger_parts, report_page, usd_text, write_report
from reporting.run_history import RunHistory, read_history
from reporting.samples.heat_map import heat_map
from reporting.samples.sample_log import Said
from reporting.samples.sample_sections import gallery, sample_sections
from tests.reporting.samples.sampled import sample
from tests.reporting.written_runs import start, step, training, write_resolved, write_run
from training.telemetry.curves import Curve
from training.telemetry.metrics_log import EVALUATIONS, SAMPLES

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = '<script>alert(1)<"$é'
LONG = "speedrun-qwen3-8xh100-learning-rate-0.01-warmup-10-seed-"
LIMIT = 3_000_000  # bytes of a page


def _page(*runs: Path) -> str:
    return report_page(runs, [read_history(run) for run in runs], {})


def test_names_and_details_are_shown_as_text_and_commands_are_quoted(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / HOSTILE, training()))
    assert "<script>alert" not in page
    assert "<i>loss" not in page
    assert "evaluate.py loss &#39;/" in page


def _sampled(names: Sequence[str], checkpoints: int) -> dict[str, Markup]:
    """Return the sections on samples of named runs, with texts as long as recorded ones."""
    said = [
        Said(prompt=f"Prompt {number}", temperature=way, text="word " * 8 + " " * 20)
        for number in range(6)
        for way in (0, 1)
    ]
    texts = "held-out text & <b>\n" * 26
    samples = [sample(100 * at, 3.0 + 2 / at, text=texts, said=said) for at in range(1, checkpoints + 1)]
    runs = [(name, samples) for name in names]
    parts = {"Samples": gallery(runs), "Log-probabilities": heat_map(runs)}
    return {title: html for title, html in parts.items() if html}


def test_a_run_that_was_killed_is_not_said_to_be_without_an_ended_job(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "run", [start(), step(10)]))
    assert "<span>killed</span>" in page and "a killed job does not" in page and "has ended yet" not in page


def test_a_lost_part_is_explained_and_a_total_stands_below(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "run", training()))
    assert "lost: the whole time of jobs that were killed" in page
    assert "<th>total</th><th>100 s</th><th>$0.05556</th>" in page


def test_runs_without_evaluations_are_named_with_the_command_that_measures_them(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, training()) for name in ("one", "two", "three")]
    (runs[0] / "evaluations.jsonl").write_text("{}\n")
    page = _page(*runs)
    assert f"To measure the held-out loss: python evaluate.py loss {runs[1]} {runs[2]}" in page


def test_a_page_of_the_largest_runs_is_far_below_its_limit(tmp_path: Path) -> None:
    steps = np.arange(1.0, 100_001.0)
    noise = np.random.default_rng(0).normal(size=len(steps))
    run = read_history(write_run(tmp_path / "run", training(10)))
    names = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
    curves = {name: Curve(steps, 3 + 2 * np.exp(-steps / 9000) + noise / 10) for name in names}
    curves["validation_loss"] = Curve(steps[99::100], curves["train_loss"].values[99::100])
    axes = {name: Curve(steps, steps * 20_480) for name in run.axes}
    histories = [attrs.evolve(run, name=f"{LONG}{at}", curves=curves, axes=axes) for at in range(8)]
    page = report_page([tmp_path / "run"] * 8, histories, _sampled([one.name for one in histories], 100))
    assert len(page.encode()) < 0.8 * LIMIT


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    return read_history(write_run(tmp_path / "run", training()))


def parts(history: RunHistory, **seconds: float) -> list[LedgerPart]:
    return list(ledger_parts(attrs.evolve(history, ledger=seconds)))


def test_a_part_has_one_colour_whatever_other_parts_there_are(history: RunHistory) -> None:
    colours = {part.name: part.colour for part in parts(history, compile=1.0, training=2.0, lost=3.0)}
    fewer = {part.name: part.colour for part in parts(history, training=2.0, lost=3.0)}
    assert colours == fewer | {"compile": 2} and len(set(colours.values())) == 3


def test_a_bar_is_at_most_whole_even_with_a_part_below_zero(history: RunHistory) -> None:
    found = parts(history, training=10.0, lost=-5.0)
    assert [(part.share, part.seconds) for part in found] == [(1.0, "10 s"), (0.0, "-5 s")]
    page = report_page([Path()], [attrs.evolve(history, ledger={"training": 10.0, "lost": -5.0})], {})
    assert "<th>total</th><th>5 s</th>" in page and "lost: the whole time" not in page


def test_bars_of_several_runs_have_one_scale(history: RunHistory) -> None:
    runs = [attrs.evolve(history, ledger={"training": seconds}) for seconds in (13.0, 45.0)]
    page = report_page([Path()] * 3, [*runs, attrs.evolve(history, ledger={})], {})
    assert re.findall(r'class="ledger" role="img" style="width:([\d.]+)%', page) == ["28.889", "100.000"]


def test_dollars_of_a_part_have_the_digits_of_the_total(history: RunHistory) -> None:
    found = ledger_parts(attrs.evolve(history, ledger_usd=0.01376))
    assert [part.usd for part in found] == ["$0.00055", "$0.01238", "$0.00083"] and usd_text(0.01, 0.01) == "$0.01000"
    assert usd_text(3.0, 1234.5) == "$3.00" and usd_text(0.001, 1234.5) == "< $0.01" and usd_text(None, None) == ""


def test_a_name_that_is_not_unicode_is_shown_escaped(tmp_path: Path) -> None:
    write_report(tmp_path / "x", "a \udcff \ud83d é")
    assert (tmp_path / "x").read_text() == "a \\udcff \\ud83d é"


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.json", ".", "pipe"])
def test_a_file_that_is_no_earlier_report_is_refused_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda _: None)
    run = write_run(tmp_path / "run", training())
    os.mkfifo(run / "pipe")
    ReportCommand(runs=(run,), no_samples=True).run()
    ReportCommand(runs=(run,), no_samples=True).run()
    with pytest.raises(BadInput, match="--output"):
        ReportCommand(runs=(run,), output=run / name, no_samples=True).run()


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
    write_resolved(runs[0], git_commit="f00d")
    write_resolved(runs[1])
    page, (first, second) = page_of(*runs)
    assert first["curves"]["train_loss"]["steps"][-1] == 100 and first["axes"].keys() >= {"steps", "dollars"}
    assert [each["step"] for each in first["samples"]] == [4, 8] and first["samples"][0]["said"][0]["text"] == "</dd>4"
    assert [each["nats_per_token"] for each in first["mean_log_probabilities"]] == [-2.0, -2.0]
    [loss, _] = first["evaluations"]
    assert (loss["measure"], loss["value"]) == (HELD_OUT.name, 2.0)
    assert loss["interval"] == pytest.approx([0.729, 3.271], abs=1e-3)  # two groups: Student with one degree of freedom
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


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
@pytest.mark.parametrize("count", [1, 8])
def test_a_browser_shows_it_on_a_phone_in_print_and_without_script(tmp_path: Path, count: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    runs = [write_run(tmp_path / f"{LONG}{number}-{HOSTILE}", training()) for number in range(count)]
    file = tmp_path / "report.html"
    histories = [read_history(run) for run in runs]
    file.write_text(report_page(runs, histories, _sampled([history.name for history in histories], 3)))
    assert file.stat().st_size < LIMIT
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        troubles: list[str] = []
        for script in (True, False):
            page = browser.new_page(viewport={"width": 360, "height": 740}, java_script_enabled=script)
            page.on("console", lambda message: troubles.append(message.text))
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("request", lambda request: troubles.append(request.url))
            page.goto(file.as_uri())
            assert page.locator(".along-steps").is_visible()
            assert page.locator(".gallery dd").first.bounding_box()["width"] > 300
            if script:
                page.locator(".along-steps svg").first.hover(position={"x": 180, "y": 50})
                told = page.locator(".along-steps .values").first.inner_text()
                assert ("training loss, average: " in told and "validation loss at 50: 3.1" in told) == (count == 1)
            page.check("#axis-dollars")
            assert page.locator(".along-dollars").is_visible()
            assert not page.locator(".along-steps").is_visible()
            if script:
                for media, scheme in (("screen", "light"), ("screen", "dark"), ("print", "light")):
                    page.emulate_media(media=media, color_scheme=scheme)
                    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                    assert page.evaluate(wide) <= 0, (media, scheme)
        browser.close()
    assert troubles == [file.as_uri()] * 2
