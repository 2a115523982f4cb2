"""The report claims no rank that the data cannot give."""

import pytest

from evaluation.judging.prompt import make_prompts
from evaluation.judging.report import describe
from evaluation.judging.scores import score
from tests.evaluation.judging.sessions import JUDGE, grades, panel


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_fine_tuning_ranks_no_model(seeds: int) -> None:
    judged = panel(2, 4, slots=seeds)
    prompts = make_prompts(judged, JUDGE, repeats=1, seed=0)
    found = score(judged, prompts, [grades(prompt, 30, 80, 95) for prompt in prompts])
    assert [standing.ranks for standing in found.standings] == ([None, None] if seeds == 1 else [(2, 2), (1, 1)])
    said = describe(judged, found)
    assert ("rank " in said.splitlines()[0]) == (seeds > 1)
    assert ("for this one fine-tuning only" in said, "--seeds 2 or more" in said) == (seeds == 1, seeds == 1)
    apart = score(judged, prompts, [grades(prompt, 60 + 9 * (-1) ** prompt.question, 61, 95) for prompt in prompts])
    assert ("not told apart" in describe(judged, apart)) == (seeds > 1)
