"""Sections on checkpoints: continuations in the order of steps, and a heat map in which every token is legible."""

import re

import attrs
import pytest

from reporting.samples.sample_sections import MOST_SHOWN, gallery, heat_map, token_text
from tests.reporting.samples.sampled import TEXT, sample
from tokens.tokenizer.tokenizer import END_OF_TEXT

CELL = re.compile(r'<span tabindex="-1" class="([^"]*)" data-t="([^"]*)">([^<]*)</span>')  # classes, words, text


def test_continuations_are_listed_by_step_and_escaped() -> None:
    page = gallery([("run", [sample(4, 2.0), sample(1200, 1.0)])])
    assert page is not None
    assert re.findall(r"<dt>(.*)</dt>", page) == ["step 4", "step 1,200"]
    assert "<i>" not in page and "Once &lt;i&gt;" in page and page.count("&lt;/dd&gt;1200") == 2
    assert page.count("<small>greedy</small>") == page.count("<small>sampled</small>") == 2


def test_the_gallery_says_that_it_shows_some_checkpoints() -> None:
    page = gallery([("run", [sample(step, 2.0) for step in range(1, 101)])])
    assert page is not None and f"{MOST_SHOWN} of 100 checkpoints" in page
    shown = re.findall(r"<dt>step (.*)</dt>", page)
    assert len(shown) == MOST_SHOWN and (shown[0], shown[-1]) == ("1", "100")


def test_a_checkpoint_without_samples_has_a_reason() -> None:
    page = gallery([("run", [sample(4, 2.0), sample(8, 2.0, said=[], problem="logits are not finite")])])
    assert page is not None and "run, step 8: logits are not finite" in page
    assert gallery([("run", [])]) is None


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


def test_a_cell_has_its_log_probability_and_difference() -> None:
    page = heat_map([("run", [sample(4, 1.5), sample(8, 0.5)])])
    assert page is not None
    first, second, *_ = cells = CELL.findall(page)
    assert "".join(text for *_, text in cells) == "cafC3A9·&lt;b&gt;↵\n·&amp;·x"
    assert first[0] == "" and first[1].endswith("not predicted: no token comes before it")
    assert second == (
        "w p3 a4",
        "a  token 1 of 13, id 97\nfirst in a window of 8 tokens: predicted from one token\n-0.50 nats, 60.7%\n"
        "difference +1.00 nats",
        "a",
    )
    assert "<td>step 4</td><td>1.500</td>" in page and "<td>step 8</td><td>0.500</td>" in page
    assert "step 8 against step 4</label>" in page


def test_only_runs_on_the_same_text_are_compared() -> None:
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


def test_infinite_losses_are_marked() -> None:
    page = heat_map([("run", [sample(4, 2.0, log_probabilities=[None] * 13)])])
    assert page is not None and page.count("\nnot finite") == 13 and "<td>not finite</td>" in page


def test_a_page_of_many_checkpoints_stays_small() -> None:
    page = heat_map([("run", [sample(step, 8 / step, text=TEXT * 40) for step in range(1, 1001)])])
    assert page is not None and len(page) < 150_000 and page.count("<td>step ") == 40
