"""Errors: untrusted text is escaped and cut; the nearest known word is suggested; failed advice ends nothing."""

import pickle
from pathlib import Path

import pytest

from common import errors
from common.errors import (
    BadInput,
    InvalidValue,
    Problem,
    advisory,
    check_all,
    nearest,
    newly_dropped,
    note,
    printable,
    quoted,
    refusing,
    show,
    warning,
)


def test_control_characters_of_names_do_not_reach_the_terminal() -> None:
    name = "a\x1b[2Jb\nc\u202ed\udcff\x00"
    assert printable(name) == "a\\x1b[2Jb\\nc\\u202ed\\udcff\\x00"
    assert str(BadInput(name)) == printable(name)
    assert printable("Größe 模型") == "Größe 模型"


def test_values_in_errors_are_cut() -> None:
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert "too large to print" in quoted(nested)
    assert "too large to print" in quoted(10**5000)
    assert len(quoted("x" * 10_000)) < 140


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("warmup_step", "did you mean 'warmup_steps'?"),
        ("x", "known: shuffle, warmup_steps"),
        ("shuffle" * 10_000, "known: shuffle, warmup_steps"),
    ],
)
def test_the_nearest_known_word_is_suggested(word: str, hint: str) -> None:
    assert nearest(word, ["warmup_steps", "shuffle"]) == hint


def test_advice_that_fails_is_noted_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(errors, "_dropped", {})
    for value in (1, 0, 0):
        with advisory("prices"):
            assert 1 / value == 1
    [(name, problem)] = newly_dropped()
    assert name == "prices" and problem.startswith("ZeroDivisionError in test_errors.py:")
    assert capsys.readouterr().err == f"WARNING: prices: dropped: {problem}\n"
    assert [*newly_dropped()] == []
    with pytest.raises(KeyError), advisory("heartbeat", KeyError):
        raise KeyError


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
def test_a_problem_is_data_and_one_line(problem: Problem, line: str) -> None:
    assert str(problem).startswith(line) and str(BadInput(problem)) == str(problem)
    assert str(InvalidValue(problem)) == str(problem)


def test_errors_keep_their_data_through_places_and_processes() -> None:
    wrong = Problem(key="token", found="'hunter2secret'", expected="a number")
    with pytest.raises(BadInput) as raised, refusing("a.json", "correct it"):
        raise InvalidValue(wrong)
    [problem] = raised.value.problems
    assert (problem.where, problem.key, problem.found, problem.advice) == ("a.json", "token", wrong.found, "correct it")
    with pytest.raises(BadInput) as raised, refusing("--like", kinds=(BadInput,)):
        raise BadInput(problem, Problem(text="full"), "full", reason="disk-full")
    error = pickle.loads(pickle.dumps(raised.value))
    assert [one.where for one in error.problems] == ["--like: a.json", "--like"]  # equal lines are one
    assert (error.reason, error.alone, str(error)) == ("disk-full", False, str(raised.value))
    with (
        pytest.raises(BadInput, match=r"^/absent/f: No such file or directory$"),
        refusing("/absent/f", kinds=(OSError,)),
    ):
        Path("/absent/f").read_text()


def test_several_errors_have_one_reason_if_it_is_the_same() -> None:
    def full() -> None:
        raise BadInput("full", reason="disk-full")

    def wrong() -> None:
        raise BadInput("wrong")

    for checks, reason in (((full, full), "disk-full"), ((full, wrong), "user-error")):
        with pytest.raises(BadInput) as raised:
            check_all(*checks)
        assert raised.value.reason == reason


def test_severity_alone_decides_where_a_line_goes(capsys: pytest.CaptureFixture[str]) -> None:
    show(["WARNING: is a word of this result", note("a\x1b"), warning("token=abcdef0123456789abcdef")])
    printed = capsys.readouterr()
    assert printed.out == "WARNING: is a word of this result\n"
    assert printed.err == "NOTE: a\\x1b\nWARNING: token=[secret]\n"
