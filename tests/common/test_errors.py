"""Errors: untrusted text is escaped and cut; the nearest known word is suggested; failed advice ends nothing."""

import pytest

from common import errors
from common.errors import BadInput, advisory, nearest, newly_dropped, printable, quoted


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
