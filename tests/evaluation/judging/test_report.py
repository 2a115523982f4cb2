"""The report claims no rank that the data cannot give."""

from typing import Any

import pytest

from evaluation.judging.prompt import make_prompts
from evaluation.judging.report import describe
from evaluation.judging.scores import score
from tests.evaluation.judging.sessions import JUDGE, panel


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_fine_tuning_ranks_no_model(seeds: int) -> None:
    judged = panel(2, 4, slots=seeds)
    prompts = make_prompts(judged, JUDGE, repeats=1, seed=0)
    alike: list[Any] = [tuple({0: 30, 1: 80, 2: 95}[a] for a in p.order) for p in prompts]
    found = score(judged, prompts, alike)
    assert [standing.ranks for standing in found.standings] == ([None, None] if seeds == 1 else [(2, 2), (1, 1)])
    said = describe(judged, found)
    assert ("rank " in said.splitlines()[0]) == (seeds > 1)
    assert ("for this one fine-tuning only" in said, "--seeds 2 or more" in said) == (seeds == 1, seeds == 1)
    apart = score(
        judged, prompts, [tuple({0: 60 + 9 * (-1) ** p.question, 1: 61, 2: 95}[a] for a in p.order) for p in prompts]
    )
    assert ("not told apart" in describe(judged, apart)) == (seeds > 1)
