"""Gallery: prompts with the continuations of checkpoints in order of step, escaped."""

import re

from reporting.samples.sample_sections import MOST_SHOWN, gallery
from tests.reporting.samples.sampled import sample


def test_continuations_are_listed_by_step_and_escaped() -> None:
    page = gallery([("run", [sample(4, 2.0), sample(1200, 1.0)])])
    assert page is not None
    assert re.findall(r"<dt>(.*)</dt>", page) == ["step 4", "step 1,200"]
    assert "<i>" not in page and "Once &lt;i&gt;" in page and page.count("&lt;/dd&gt;1200") == 2
    assert page.count("<small>greedy</small>") == page.count("<small>sampled</small>") == 2


def test_of_many_checkpoints_some_are_shown_and_the_page_says_so() -> None:
    page = gallery([("run", [sample(step, 2.0) for step in range(1, 101)])])
    assert page is not None and f"{MOST_SHOWN} of 100 checkpoints" in page
    shown = re.findall(r"<dt>step (.*)</dt>", page)
    assert len(shown) == MOST_SHOWN and (shown[0], shown[-1]) == ("1", "100")


def test_a_checkpoint_that_says_nothing_is_named_with_its_reason() -> None:
    page = gallery([("run", [sample(4, 2.0), sample(8, 2.0, said=[], problem="logits are not finite")])])
    assert page is not None and "run, step 8: logits are not finite" in page
    assert gallery([("run", [])]) is None
