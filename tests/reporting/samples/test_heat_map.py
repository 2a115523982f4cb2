"""Heat map: values are those of the samples, runs are compared on one text only, and it works without a script."""

import json
import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.web_page import render
from reporting.samples.heat_map import css_string, heat_map
from tests.reporting.samples.sampled import TEXT, sample

CHROMIUM = Path("/usr/bin/chromium")


CELL = re.compile(r'<span tabindex="-1" class="([^"]*)" data-t="([^"]*)"((?: data-\d+="[^"]*")*)>([^<]*)</span>')


def cells(page: str) -> list[tuple[str, str, list[str], str]]:
    """Return (classes, text under the pointer, values of the views, text) of each cell."""
    found = CELL.findall(page)
    return [(classes, about, re.findall(r'"([^"]*)"', values), text) for classes, about, values, text in found]


def test_a_cell_tells_its_log_probability_and_that_of_a_character_is_the_sum_of_its_bytes() -> None:
    page = heat_map([("run", [sample(4, 1.5), sample(8, 0.5)])])
    assert page is not None
    first, second, *_ = found = cells(page)
    assert "".join(text for *_, text in found) == "café·&lt;b&gt;↵\n·&amp;·x"
    assert "not predicted" in first[1] and first[0].startswith("v0u") and first[2] == []
    assert "token 1 of 13, id 97" in second[1]
    assert second[2] == ["-0.50 nats, 60.7%", "+1.00 nats"]
    _, about, values, _ = next(cell for cell in found if cell[3] == "é")
    assert "tokens 3 to 4 of 13, id 195, 169" in about and values[0] == f"-1.00 nats, {math.exp(-1):.1%}"


def test_a_label_is_in_the_page_once_for_each_use_and_ends_no_style_sheet() -> None:
    assert css_string('</style>"\n1') == r'"\00003c\00002fstyle\00003e\000022\00000a1"'
    name = "a-run-with-a-long-name"
    page = heat_map([(name, [sample(4, 1.5, text=TEXT * 20)]), ("other", [sample(4, 0.5, text=TEXT * 20)])])
    assert page is not None and page.count(name) < 20


def test_means_and_greatest_differences_are_listed() -> None:
    better = [-2.0] * 13
    better[4] = -0.25  # the space after "café"
    page = heat_map([("run", [sample(4, 2.0), sample(8, 2.0, log_probabilities=better)])])
    assert page is not None
    assert "<td>step 4</td><td>2.000</td>" in page and "<td>step 8</td><td>1.865</td>" in page
    assert re.search(r'café<b class="a">·</b></td><td>\+1\.75</td>', page)


def test_runs_are_compared_on_the_same_text_only() -> None:
    runs = [("one", [sample(4, 2.0)]), ("two", [sample(4, 1.0)]), ("<three>", [sample(4, 1.0, text="another text")])]
    shorter = sample(4, 2.0).held_out
    assert shorter is not None
    runs.append(("four", [sample(4, 1.0, held_out=attrs.evolve(shorter, window=4))]))
    page = heat_map(runs)
    assert page is not None
    assert "two, step 4 against one, step 4</label>" in page and cells(page)[1][2][1] == "+1.00 nats"
    assert "&lt;three&gt; is left out: it was measured on another text" in page and "<three>" not in page
    assert "four is left out" in page and "four, step" not in page
    unmeasured = heat_map([*runs[:2], ("five", [sample(4, 1.0, held_out=None, log_probabilities=None)])])
    assert unmeasured is not None and "five is left out: no log-probabilities are recorded" in unmeasured
    assert heat_map([("run", [sample(4, 2.0, held_out=None, log_probabilities=None)])]) is None


def test_losses_that_are_not_finite_are_shown_as_such() -> None:
    page = heat_map([("run", [sample(4, 2.0, log_probabilities=[None] * 13)])])
    assert (
        page is not None
        and [values for *_, values, _ in cells(page)].count(["not finite"]) == 12
        and "<td>not finite</td>" in page
    )


def test_a_page_of_many_checkpoints_stays_small() -> None:
    page = heat_map([("run", [sample(step, 8 / step, text=TEXT * 40) for step in range(1, 1001)])])
    assert page is not None and len(page) < 500_000
    data = json.loads(re.findall(r'id="heat-data">(.*?)</script>', page)[0])
    assert len(data["labels"]) == 40 and data["labels"][-1] == "step 1,000"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
@pytest.mark.parametrize("script", [False, True])
def test_in_a_browser_views_and_text_under_the_pointer_work_with_and_without_a_script(
    tmp_path: Path, script: bool
) -> None:
    playwright: Any = pytest.importorskip("playwright.sync_api")
    page = heat_map([("run", [sample(4, 6.0), sample(8, 0.5), sample(12, 3.0)])])
    file = tmp_path / "page.html"
    file.write_text(
        f"<!doctype html><meta charset=utf-8><style>{render('reporting/templates/samples.css')}</style>{page}"
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_context(viewport={"width": 390, "height": 800}, java_script_enabled=script).new_page()
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.goto(file.as_uri())
        cell = opened.locator(".heat > .text > span").nth(2)
        background = "element => getComputedStyle(element).backgroundColor"
        seen = {}
        for label in ("step 12", "step 12 against step 4"):
            opened.get_by_text(label, exact=True).first.click()
            seen[label] = cell.evaluate(background)
            legends = [legend.is_visible() for legend in opened.locator(".legend").all()]
            assert legends == ["against" not in label, "against" in label]
        assert len(set(seen.values())) == 2
        cell.hover()
        told = cell.evaluate("element => getComputedStyle(element, '::after').content")
        assert "step 12: -3.00 nats, 5.0%" in told
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        selects = opened.locator(".choice select")
        assert selects.first.is_visible() == script
        if script:
            selects.nth(0).select_option("1")
            selects.nth(1).select_option("2")
            assert "step 8 against step 12: 2.50 nats" in cell.get_attribute("data-chosen")
            assert cell.evaluate(background) == seen["step 12 against step 4"]  # 2 nats and more
            opened.locator(".heat > .text > span").nth(0).focus()
            opened.keyboard.press("ArrowRight")
            assert opened.evaluate("document.activeElement.textContent") == "a"
        browser.close()
        assert problems == []
