"""Scores and report: no rank that the data cannot give; what was not judged counts for nobody."""

import pytest

from evaluation.judging.prompt import make_prompts
from evaluation.judging.scores import describe, score
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


def test_what_is_not_judged_counts_for_nobody() -> None:
    judged = panel(2, 4)
    prompts = make_prompts(judged, JUDGE, repeats=2, seed=0)
    verdicts = [grades(p, *(score - 10 * p.question for score in (80, 30, 95))) for p in prompts]
    full = score(judged, prompts, verdicts)
    assert [standing.score.value for standing in full.standings] == [65, 15]
    assert full.anchor == 80
    without = [
        None if p.question == 3 or n == 0 else verdict
        for n, (p, verdict) in enumerate(zip(prompts, verdicts, strict=True))
    ]
    assert [standing.score.value for standing in score(judged, prompts, without).standings] == [70, 20]
