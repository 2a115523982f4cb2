"""A judgement's result is what the judge said: over all orders, seeds and models."""

import json
from pathlib import Path
from typing import Any

from tests.evaluation.judging.sessions import ORDERS, QUESTIONS, Result, Sessions, quality, write
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
