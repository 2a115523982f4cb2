"""Scores are means of the judge's grades.

They are stored only once. A result with fewer verdicts never replaces them, and they are compared only within their
session.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evaluation.comparison.compare import compare
from evaluation.judging.prompt import Grade, Prompt, make_prompts
from evaluation.judging.scores import TWO_SEEDS_ASSUMPTION, JudgedCandidate, describe, judged_difference, score
from evaluation.shared.significance import Interval
from tests.conftest import one_line
from tests.evaluation.comparison.stored import judged, rows_of
from tests.evaluation.judging.sessions import JUDGE, ORDERS, PROMPTS, QUESTIONS, Result, Sessions, panel, quality, write
from tests.judge_server import Judge


def grades(prompt: Prompt, *scores: float) -> list[Grade]:
    """Return a verdict on a prompt. `scores`: the score of each candidate, and then the score of the reference."""
    return [Grade(score=scores[answer], comment="") for answer in prompt.order]


def test_scores_are_means_of_the_judges_grades(faultless: Result) -> None:
    good, poor = faultless["candidates"]
    assert faultless["candidate"] == "good"  # this line was read from the results of the model "good"
    assert (good["model"], good["score"]) == ("good", 62)  # mean of 60, 61, 62, 63, 64
    assert (poor["model"], poor["score"]) == ("poor", 42)
    assert faultless["anchor"] == 95
    (difference,) = faultless["differences"]
    assert (difference["a"], difference["b"], difference["value"]) == ("good", "poor", 20)
    assert difference["low"] == difference["high"] == 20  # the same for every question
    assert faultless["questions"]["count"] == QUESTIONS
    assert (faultless["left_out"], faultless["refused"], faultless["orders"]) == (0, 0, ORDERS)


def test_position_bias_does_not_change_differences(server: Judge, sessions: Sessions) -> None:
    def biased(prompt: dict[str, Any]) -> dict[str, int]:
        return {label: score + (5 if label == "A" else 0) for label, score in quality(prompt).items()}

    server.scorer = biased
    sessions.said("--orders", "2")
    stored = sessions.result()
    assert abs(stored["differences"][0]["value"] - 20) < 1
    alone = sessions.said(files=sessions.files[:1])
    assert "\ndifference" not in alone
    assert [row["model"] for row in sessions.result()["candidates"]] == ["good"]


def test_seeds_of_a_model_are_judged_side_by_side(server: Judge, sessions: Sessions, tmp_path: Path) -> None:
    more = [write(tmp_path, *answers) for answers in (("good", 64, 1), ("poor", 40, 1), ("poor", 0, 2))]
    done = sessions.said("--orders", "1", files=[*sessions.files, *more])
    assert "judging the first 2 seeds of each model" in done
    assert len(server.requests) == 2 * QUESTIONS
    good, poor = sessions.result()["candidates"]
    assert (good["score"], poor["score"]) == (64, 42)  # from seeds 0 and 1
    assert sessions.result()["seeds"] == 2
    assert all(len(json.loads(body["messages"][1]["content"])["answers"]) == 3 for body in server.requests)


@pytest.mark.parametrize("seeds", [1, 2])
def test_single_fine_tunings_are_not_ranked(seeds: int) -> None:
    models = panel(2, 4, slots=seeds)
    prompts = make_prompts(models, JUDGE, repeats=1, seed=0)
    scores = score(models, prompts, [grades(prompt, 30, 80, 95) for prompt in prompts])
    assert seeds == 1 or [scores.ranks(number) for number in (0, 1)] == [(2, 2), (1, 1)]
    text = describe(models, scores)
    assert ("rank " in text.splitlines()[0]) == (seeds > 1)
    assert ("only one fine-tuning run" in text, "--seeds 2 or more" in text) == (seeds == 1, seeds == 1)
    mixed = score(models, prompts, [grades(prompt, 60 + 9 * (-1) ** prompt.question, 61, 95) for prompt in prompts])
    assert ("not significant" in describe(models, mixed)) == (seeds > 1)


@pytest.mark.parametrize("seeds", [2, 3])
def test_two_seeds_state_their_assumption(seeds: int) -> None:
    models = panel(2, 4, slots=seeds)
    prompts = make_prompts(models, JUDGE, repeats=1, seed=0)
    text = describe(models, score(models, prompts, [grades(prompt, 30, 80, 95) for prompt in prompts]))
    assert (TWO_SEEDS_ASSUMPTION in text) == (seeds == 2)


def test_prompts_without_a_verdict_do_not_count() -> None:
    models = panel(2, 4)
    prompts = make_prompts(models, JUDGE, repeats=2, seed=0)
    verdicts = [grades(p, *(score - 10 * p.question for score in (80, 30, 95))) for p in prompts]
    full = score(models, prompts, verdicts)
    assert [mean.value for mean in full.means] == [65, 15]
    assert full.anchor == 80
    without = [
        None if p.question == 3 or n == 0 else verdict
        for n, (p, verdict) in enumerate(zip(prompts, verdicts, strict=True))
    ]
    assert [mean.value for mean in score(models, prompts, without).means] == [70, 20]


def test_less_complete_judgment_adds_no_result(server: Judge, sessions: Sessions) -> None:
    for effort in ("low", "none", "low", "none"):
        done = sessions.said("--effort", effort)
    assert re.search(
        r"good: no result was added, because the result of \S+ leaves out 0 prompts, and the new result leaves out 0",
        done,
    )
    complete = sessions.results.read_text()
    assert len(complete.splitlines()) == 2
    sessions.store.unlink()
    server.said.clear()
    server.faults = dict.fromkeys(range(8, PROMPTS), "400")
    refused = one_line(sessions.run("--effort", "low"))
    assert "7 of 15 prompts (47%) have no verdict, wanted at most 10%, so the result was not stored" in refused
    server.every = "400"
    done = sessions.said("--effort", "low", "--allow-left-out", "50")
    assert "leaves out 0 prompts, and the new result leaves out 7" in done
    assert sessions.results.read_text() == complete


def test_snapshot_and_comments_are_stored(server: Judge, sessions: Sessions) -> None:
    server.snapshot, server.faults = "scripted-2026-01-01", dict.fromkeys(range(8, PROMPTS), "400")
    assert sessions.run().returncode == 1  # too few verdicts for a result
    (comments,) = sessions.files[0].parent.glob("judged-by-scripted-????????.md")
    done = sessions.run()
    assert f"the judge's comments: {comments}" in done.stdout
    assert "answered by: scripted-2026-01-01" in done.stdout
    assert sessions.result()["judge_snapshots"] == ["scripted-2026-01-01"]
    text = comments.read_text()
    assert text.count("- 95: follows the instruction closely") == PROMPTS
    assert "## 1. Instruction 0" in text
    assert "**poor**, seed 0\n\n> poor says to 0: 40\n\n- 40: follows" in text
    comments.write_text("notes of the user")
    done = sessions.run()
    refusal = f"{comments}: is not a file of the judge's comments, so it was not overwritten (17 bytes)"
    assert done.returncode == 0 and refusal in done.stdout and comments.read_text() == "notes of the user"
    sessions.said("--orders", "2", "--effort", "low")
    assert len(list(sessions.files[0].parent.glob("judged-by-*.md"))) == 2


def test_compare_ranks_no_single_fine_tunings(tmp_path: Path) -> None:
    clear = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    homes = [judged(tmp_path / name, [20, 17, 23], clear, seeds=1) for name in "ab"]
    comparison = compare(rows_of(*homes))
    statement = "judge's score: a and b cannot be ranked with one fine-tuning run each: -4.00 [-7.00, -1.00] points"
    assert comparison.statements == [statement]
    assert any(
        "95% intervals over questions only, because each model has one fine-tuning run" in note
        for note in comparison.notes
    )


def test_judged_runs_with_equal_names_are_distinguished(tmp_path: Path) -> None:
    names = ["run (/one)", "run (/two)"]
    clear = [{"a": names[1], "b": names[0], "value": 4.0, "low": 1.0, "high": 7.0}]
    first = judged(tmp_path / "one" / "run", [20, 17, 23], clear, candidate=names[0])
    second = judged(tmp_path / "two" / "run", [20, 17, 23], clear, candidate=names[1])
    comparison = compare(rows_of(first, second))
    assert comparison.statements[0].startswith(
        f"judge's score: {first}: run is below {second}: run by 4.00 [1.00, 7.00] points"
    )


def test_several_candidates_give_the_mean_difference() -> None:
    pairs = {("a", "c"): Interval(value=4, low=1, high=7), ("b", "c"): Interval(value=2, low=0, high=4)}
    a, b, c = (JudgedCandidate(name=name, differences=pairs) for name in "abc")
    assert judged_difference([a, b], [c], 0.95) == Interval(value=3, low=0.5, high=5.5)
    assert judged_difference([a], [b], 0.95) is None


def test_new_answers_add_a_new_result(sessions: Sessions) -> None:
    sessions.said("--effort", "none")
    first = sessions.result()
    changed = sessions.files[0].read_text().replace("good says to", "good says now to")
    sessions.files[0].write_text(json.dumps(json.loads(changed) | {"weights_sha256": "a" * 64}))
    assert "no result was added" not in sessions.said("--effort", "none")
    assert sessions.result()["answers_sha256"] != first["answers_sha256"]
    assert sessions.result()["weights_sha256"] == "a" * 64
