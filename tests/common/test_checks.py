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


def test_choices_are_listed() -> None:
    made = attrs.make_class("Made", {"field": attrs.field(validator=checks.one_of("a", "b"))}, frozen=True)
    assert made("a").field == "a"
    with pytest.raises(ValueError, match='field: got \'c\', wanted "a" or "b"'):
        made("c")
