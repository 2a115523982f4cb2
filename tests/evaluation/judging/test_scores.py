"""Scores: what was not judged counts for nobody."""

from evaluation.judging.prompt import make_prompts
from evaluation.judging.scores import score
from tests.evaluation.judging.sessions import JUDGE, grades, panel


def test_what_is_not_judged_counts_for_nobody() -> None:
    judged = panel(2, 4)
    prompts = make_prompts(judged, JUDGE, repeats=2, seed=0)
    verdicts = [grades(p, *(score - 10 * p.question for score in (80, 30, 95))) for p in prompts]
    full = score(judged, prompts, verdicts)
    assert [standing.score.value for standing in full.standings] == [65, 15]
    assert full.anchor == 80
    assert full.doubtful == [1, 2, 3]
    assert full.disagreement == 0
    without = [
        None if p.question == 3 or n == 0 else verdict
        for n, (p, verdict) in enumerate(zip(prompts, verdicts, strict=True))
    ]
    assert [standing.score.value for standing in score(judged, prompts, without).standings] == [70, 20]
