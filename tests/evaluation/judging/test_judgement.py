"""A judgement's result is what the judge said: over all orders, seeds and models."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.judging.prompt import make_prompts
from evaluation.judging.scores import describe, score
from tests.evaluation.judging.sessions import JUDGE, ORDERS, QUESTIONS, Result, Sessions, grades, panel, quality, write
from tests.judge_server import Judge


def test_scores_are_those_that_the_judge_gave(faultless: Result) -> None:
    good, poor = faultless["candidates"]
    assert faultless["candidate"] == "good"  # which of them the line is of
    assert (good["model"], good["score"]) == ("good", 62)  # 60 to 64, each once
    assert (poor["model"], poor["score"]) == ("poor", 42)
    assert faultless["anchor"] == 95
    (difference,) = faultless["differences"]
    assert (difference["a"], difference["b"], difference["value"]) == ("good", "poor", 20)
    assert difference["low"] == difference["high"] == 20  # the same for every question
    assert faultless["questions"]["count"] == QUESTIONS
    assert (faultless["left_out"], faultless["refused"], faultless["orders"]) == (0, 0, ORDERS)


def test_a_judge_that_likes_the_first_answer_moves_no_difference(server: Judge, sessions: Sessions) -> None:
    def biased(asked: dict[str, Any]) -> dict[str, int]:
        return {label: score + (5 if label == "A" else 0) for label, score in quality(asked).items()}

    server.scorer = biased
    done = sessions.run("--orders", "2")
    assert done.returncode == 0, done.stderr
    found = sessions.result()
    assert abs(found["differences"][0]["value"] - 20) < 1
    alone = sessions.run(files=sessions.files[:1])
    assert alone.returncode == 0, alone.stderr
    assert "\ndifference" not in alone.stdout
    assert [row["model"] for row in sessions.result()["candidates"]] == ["good"]


def test_seeds_of_a_model_are_judged_side_by_side(server: Judge, sessions: Sessions, tmp_path: Path) -> None:
    more = [
        write(tmp_path, "good", 64, seed=1),
        write(tmp_path, "poor", 40, seed=1),
        write(tmp_path, "poor", 0, seed=2),
    ]
    done = sessions.run("--orders", "1", files=[*sessions.files, *more])
    assert done.returncode == 0, done.stderr
    assert "judged: the first 2 of each model's seeds" in done.stdout
    assert len(server.requests) == 2 * QUESTIONS
    good, poor = sessions.result()["candidates"]
    assert (good["score"], poor["score"]) == (64, 42)  # of seed 0 and 1
    assert sessions.result()["seeds"] == 2
    assert all(len(json.loads(body["messages"][1]["content"])["answers"]) == 3 for body in server.requests)


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_fine_tuning_ranks_no_model(seeds: int) -> None:
    judged = panel(2, 4, slots=seeds)
    prompts = make_prompts(judged, JUDGE, repeats=1, seed=0)
    found = score(judged, prompts, [grades(prompt, 30, 80, 95) for prompt in prompts])
    assert seeds == 1 or [found.ranks(number) for number in (0, 1)] == [(2, 2), (1, 1)]
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
    assert [mean.value for mean in full.means] == [65, 15]
    assert full.anchor == 80
    without = [
        None if p.question == 3 or n == 0 else verdict
        for n, (p, verdict) in enumerate(zip(prompts, verdicts, strict=True))
    ]
    assert [mean.value for mean in score(judged, prompts, without).means] == [70, 20]
