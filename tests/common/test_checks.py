"""Checks of configuration fields and options: accepted values, and the words of a refusal."""

from typing import Any

import attrs
import pytest

from common import checks


@pytest.mark.parametrize(
    ("check", "good", "bad", "wanted"),
    [
        (checks.integer(1, 8), [1, 8], [0, 9, True, 1.0, "1", None], "an integer of at least 1, at most 8"),
        (
            checks.number(0.0),
            [0, 0.5, 1e38],
            [-1, True, float("nan"), float("inf"), 10**400, 1e308, 5e-324, "0"],
            "a number from 0",
        ),
        (checks.number(0.0, 1.0, above=True), [1e-9, 1], [0, 1.1], "a number above 0 up to 1"),
        (checks.text(), ["x"], ["", 1, None], "a non-empty string"),
        (checks.boolean(), [True, False], [1, 0, "true", None], "true or false"),
        (checks.boolean("auto"), [True, "auto"], ["model", 1], 'true, false or "auto"'),
        (checks.one_of("a", "b"), ["a"], ["c", None], '"a" or "b"'),
        (checks.optional(checks.integer(1)), [None, 1], [0, "1"], "an integer"),
    ],
)
def test_values_are_accepted_or_refused_in_words(
    check: checks.ValueCheck, good: list[Any], bad: list[Any], wanted: str
) -> None:
    made = attrs.make_class("Made", {"field": attrs.field(validator=check)}, frozen=True)
    for value in good:
        assert made(value).field == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^field: got .*, wanted {wanted}"):
            made(value)


@pytest.mark.parametrize(
    ("check", "good", "bad", "wanted"),
    [
        (checks.integer(1), {"8": 8}, ["0", "1.5", "1e3", "many", ""], "an integer of at least 1"),
        (checks.number(0), {"0": 0.0}, ["-1", "nan", "inf", "1e999", "x"], "a number from 0"),
        (checks.number(0, 1, above=True, below=True), {"0.5": 0.5}, ["0", "1"], "a number above 0 and below 1"),
        (checks.number(0, above=True, example="3.5"), {"3": 3.0}, ["14,32", "$14"], "a number above 0, such as 3.5"),
    ],
)
def test_texts_of_options_are_numbers_or_refused_in_words(
    check: checks.ValueCheck, good: dict[str, float], bad: list[str], wanted: str
) -> None:
    for text, value in good.items():
        assert check.parse(text) == value
    for text in bad:
        with pytest.raises(ValueError, match=rf"^got '.*', wanted {wanted}"):
            check.parse(text)
