"""Verdicts are read strictly, whatever surrounds them."""

import json
import re

import pytest

from evaluation.judging.verdict import read_grades


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("", "not JSON, or cut off"),
        ('{"grades": [{"label": "A", "comment": "", "sco', "not JSON, or cut off"),
        ("[]", "not of the schema"),
        ("null", "not of the schema"),
        ('{"grades": 3}', "not of the schema"),
        ('{"grades": [{"label": "A"}]}', "not of the schema"),
        ('{"grades": []}', "labels none, wanted A, B once each"),
        (grades := '{"grades": [{"label": "A", "score": 1}, {"label": %s, "score": %s}]}', "not JSON, or cut off"),
        (grades % ('"C"', "2"), "labels A, C, wanted A, B once each"),
        (grades % ('"A"', "2"), "labels A, A, wanted A, B once each"),
        (grades % ('["B"]', "2"), "labels A, ['B'], wanted A, B once each"),
        (grades % ('"B"', "-1"), "score -1 of B, wanted a number from 0 to 100"),
        (grades % ('"B"', "101"), "score 101 of B"),
        (grades % ('"B"', "NaN"), "score nan of B"),
        (grades % ('"B"', "true"), "score True of B"),
        (grades % ('"B"', '"2/10"'), "score '2/10' of B"),
        (grades % ('"B"', '"200"'), "score 200.0 of B"),
        ('{"grades": ' + 200 * "[" + 200 * "]" + "}", "not JSON, or cut off"),
    ],
)
def test_a_wrong_verdict_is_told_by_what_is_wrong(said: str, problem: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        read_grades(said, 2)


@pytest.mark.parametrize("score", ["7", '"7"', '" 7.0 "', "7.0"])
@pytest.mark.parametrize("around", ["%s", " %s\n", "```json\n%s\n```", "```\n%s```\n", "```%s```", "```json %s```"])
def test_fences_and_numbers_in_strings_are_read(score: str, around: str) -> None:
    said = '{"grades": [{"label": "A", "score": X}, {"label": "B", "score": 56.5}]}'.replace("X", score)
    assert [grade.score for grade in read_grades(around % said, 2)] == [7, 56.5]


def test_scores_are_by_position_in_any_order_of_grades() -> None:
    said = {"grades": [{"label": "B", "comment": "", "score": 7}, {"label": "A", "comment": "", "score": 100}]}
    assert [grade.score for grade in read_grades(json.dumps(said), 2)] == [100, 7]
