"""Errors: a problem is stored as data and printed as one line, and an error can contain several problems."""

import pickle
from pathlib import Path

import pytest

from common.errors import BadInput, InvalidValue, Problem, check_all, refusing


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem(text="no"), "no"),
        (Problem(where="f", key="k", found="1", expected="2"), "f: k: got 1, wanted 2"),
        (Problem(key="k", found="1", expected="2", cause="b", advice="c"), "k: got 1, wanted 2: b; c"),
        (Problem(where="f", key="k", expected="null", cause="b"), "f: k: wanted null: b"),
        (Problem(found="1", expected="2"), "got 1, wanted 2"),
        (
            Problem(where="f", key="k", text="unknown key 'k'", advice="did you mean 'j'?"),
            "f: unknown key 'k'; did you m",
        ),
        (Problem(where="f", text="no", advice="a").at("g", "b"), "g: f: no; a; b"),
        (Problem(text="no").at("", "a"), "no; a"),
        (Problem(where="f", key="k"), "f: k"),
    ],
)
def test_a_problem_with_fields_is_printed_in_one_line(problem: Problem, line: str) -> None:
    assert str(problem).startswith(line) and str(BadInput(problem)) == str(problem)
    assert str(InvalidValue(problem)) == str(problem)


def test_errors_keep_their_fields() -> None:
    wrong_value = Problem(key="token", found="'hunter2secret'", expected="a number")
    with pytest.raises(BadInput) as raised, refusing("a.json", "correct it"):
        raise InvalidValue(wrong_value)
    [problem] = raised.value.problems
    assert (problem.where, problem.key, problem.found, problem.advice) == (
        "a.json",
        "token",
        wrong_value.found,
        "correct it",
    )
    with pytest.raises(BadInput) as raised, refusing("--like", kinds=(BadInput,)):
        raise BadInput(problem, Problem(text="full"), "full", reason="disk-full")
    error = pickle.loads(pickle.dumps(raised.value))
    assert [found_problem.where for found_problem in error.problems] == [
        "--like: a.json",
        "--like",
    ]  # equal lines are merged
    assert (error.reason, error.alone, str(error)) == ("disk-full", False, str(raised.value))
    with (
        pytest.raises(BadInput, match=r"^/absent/f: No such file or directory$"),
        refusing("/absent/f", kinds=(OSError,)),
    ):
        Path("/absent/f").read_text()


def test_joined_errors_keep_a_common_reason() -> None:
    def full() -> None:
        raise BadInput("full", reason="disk-full")

    def wrong_value() -> None:
        raise BadInput("wrong")

    for checks, reason in (((full, full), "disk-full"), ((full, wrong_value), "user-error")):
        with pytest.raises(BadInput) as raised:
            check_all(*checks)
        assert raised.value.reason == reason
