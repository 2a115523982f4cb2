"""Heat map: values are those of the samples, every token is legible, and runs are compared on one text only."""

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.web_page import render
from reporting.samples.heat_map import heat_map, token_text
from tests.reporting.samples.sampled import TEXT, sample
from tokens.tokenizer.tokenizer import END_OF_TEXT

CHROMIUM = Path("/usr/bin/chromium")
CELL = re.compile(r'<span tabindex="-1" class="([^"]*)" data-t="([^"]*)">([^<]*)</span>')  # classes, words, text


@pytest.mark.parametrize(
    ("token", "text", "kind"),
    [
        (b" ", "·", "space"),
        (b"  x", "  x", "text"),
        (b"\n", "↵\n", "space"),
        (b"\t", "⇥\t", "space"),
        (b"\x00", "␀", "text"),
        ("é中😀".encode(), "é中😀", "text"),
        ("\u00a0".encode(), "⟨U+00A0⟩", "space"),
        ("\u202e".encode(), "⟨U+202E⟩", "text"),
        (b"\xe4\xb8", "E4 B8", "bytes"),
        (b"", END_OF_TEXT, "end"),
    ],
)
def test_every_token_is_legible(token: bytes, text: str, kind: str) -> None:
    assert token_text(token.decode("latin-1")) == (text, kind)


def test_a_cell_tells_its_log_probability_and_its_difference() -> None:
    page = heat_map([("run", [sample(4, 1.5), sample(8, 0.5)])])
    assert page is not None
    first, second, *_ = found = CELL.findall(page)
    assert "".join(text for *_, text in found) == "cafC3A9·&lt;b&gt;↵\n·&amp;·x"
    assert first[0] == "" and first[1].endswith("not predicted: nothing is before it")
    assert second == (
        "w p3 a4",
        "a  token 1 of 13, id 97\nfirst of a window of 8: predicted from one token\n-0.50 nats, 60.7%\n"
        "difference +1.00 nats",
        "a",
    )
    assert "<td>step 4</td><td>1.500</td>" in page and "<td>step 8</td><td>0.500</td>" in page
    assert "step 8 against step 4</label>" in page


def test_runs_are_compared_on_the_same_text_only() -> None:
    runs = [("one", [sample(4, 2.0)]), ("two", [sample(4, 1.0)]), ("<three>", [sample(4, 1.0, text="another text")])]
    shorter = sample(4, 2.0).held_out
    assert shorter is not None
    runs.append(("four", [sample(4, 1.0, held_out=attrs.evolve(shorter, window=4))]))
    page = heat_map(runs)
    assert page is not None
    assert "two, step 4 against one, step 4</label>" in page and "difference +1.00 nats" in page
    assert "&lt;three&gt; is left out: it was measured on another text" in page and "<three>" not in page
    assert "four is left out" in page and "four, step" not in page
    unmeasured = heat_map([*runs[:2], ("five", [sample(4, 1.0, held_out=None, log_probabilities=None)])])
    assert unmeasured is not None and "five is left out: no log-probabilities are recorded" in unmeasured
    assert heat_map([("run", [sample(4, 2.0, held_out=None, log_probabilities=None)])]) is None


def test_losses_that_are_not_finite_are_shown_as_such() -> None:
    page = heat_map([("run", [sample(4, 2.0, log_probabilities=[None] * 13)])])
    assert page is not None and page.count("\nnot finite") == 13 and "<td>not finite</td>" in page


def test_a_page_of_many_checkpoints_stays_small() -> None:
    page = heat_map([("run", [sample(step, 8 / step, text=TEXT * 40) for step in range(1, 1001)])])
    assert page is not None and len(page) < 150_000 and page.count("<td>step ") == 40


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
def test_in_a_browser_views_and_text_under_the_pointer_work(tmp_path: Path) -> None:
    playwright: Any = pytest.importorskip("playwright.sync_api")
    page = heat_map([("run", [sample(4, 6.0), sample(8, 0.5), sample(12, 3.0)])])
    file = tmp_path / "page.html"
    file.write_text(
        f"<!doctype html><meta charset=utf-8><style>{render('reporting/templates/samples.css')}</style>{page}"
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_context(viewport={"width": 390, "height": 800}).new_page()
        cell = opened.locator(".heat > .text > span").nth(2)
        seen = set()
        opened.goto(file.as_uri())
        for label in ("step 12", "step 12 against step 4"):
            opened.get_by_text(label, exact=True).first.click()
            seen.add(cell.evaluate("element => getComputedStyle(element).backgroundColor"))
            legends = [legend.is_visible() for legend in opened.locator(".legend").all()]
            assert legends == ["against" not in label, "against" in label]
        assert len(seen) == 2
        cell.hover()
        told = cell.evaluate("element => getComputedStyle(element, '::after').content")
        assert "-3.00 nats, 5.0%" in told and "difference +3.00 nats" in told
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
