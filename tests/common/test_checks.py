"""Checks of configuration fields and options: accepted values, and the messages about refused values.

JSON objects are read into attrs classes, and their values are not converted. One line names a wrong value.
"""

import math
from typing import Any, Literal

import attrs
import pytest

from common import checks

ODD = [math.nan, math.inf, 10**400, 1e308, 5e-324]  # not a finite float, or a float whose square is infinite or 0


@pytest.mark.parametrize(
    ("check", "good", "bad", "accepted_values"),
    [
        (checks.integer(1, 8000), [1, 8], [0, 8001, True, 1.0, "1", None], "an integer of at least 1, at most 8,000"),
        (checks.number(0.0), [0, 0.5, 1e38], [-1, True, *ODD, "0"], "a number from 0"),
        (checks.number(0.0, 1.0, above=True), [1e-9, 1], [0, 1.1], "a number above 0 up to 1"),
        (checks.text(), ["x"], ["", 1, None], "a non-empty string"),
        (checks.boolean(), [True, False], [1, 0, "true", None], "true or false"),
        (checks.boolean("auto"), [True, "auto"], ["model", 1], 'true, false or "auto"'),
        (checks.one_of("a", "b"), ["a"], ["c", None], '"a" or "b"'),
        (checks.optional(checks.integer(1)), [None, 1], [0, "1"], "an integer"),
    ],
)
def test_values_are_accepted_or_refused(
    check: checks.ValueCheck, good: list[Any], bad: list[Any], accepted_values: str
) -> None:
    record_class = attrs.make_class("Made", {"field": attrs.field(validator=check)}, frozen=True)
    for value in good:
        assert record_class(value).field == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^field: got .*, wanted {accepted_values}"):
            record_class(value)


@pytest.mark.parametrize(
    ("check", "good", "bad", "accepted_values"),
    [
        (
            checks.integer(1),
            {"8": 8, "1e3": 1000, "1_000": 1000, "2.5M": 2_500_000, "1B": 10**9, "0.5K": 500, "+3": 3},
            ["0", "1.5", "1e-3", "many", "", "M", "1M5", "5 M", "10m", "-1K", "1e99", "1e9999", "9007199254740993"],
            r"an integer of at least 1, at most 2\^53",
        ),
        (
            checks.number(0),
            {"0": 0.0, "2K": 2000.0, "1.5e3": 1500.0},
            ["-1", "nan", "inf", "1e999", "x"],
            "a number from 0",
        ),
        (checks.number(0, 1, above=True, below=True), {"0.5": 0.5}, ["0", "1"], "a number above 0 and below 1"),
        (checks.number(0, above=True, example="3.5"), {"3": 3.0}, ["14,32", "$14"], "a number above 0, such as 3.5"),
    ],
)
def test_option_texts_are_parsed_or_refused(
    check: checks.ValueCheck, good: dict[str, float], bad: list[str], accepted_values: str
) -> None:
    for text, value in good.items():
        assert check.parse(text) == value
    for text in bad:
        with pytest.raises(ValueError, match=rf"^got '.*', wanted {accepted_values}"):
            check.parse(text)


@attrs.frozen
class Part:
    tokens: int
    name: str = ""


@attrs.frozen
class Whole:
    parts: dict[str, Part]
    share: float = 0.5
    limit: int | None = None
    nested: tuple[tuple[Part, ...], ...] = ()


def test_values_keep_their_types_and_defaults_fill_missing_keys() -> None:
    values = {"parts": {"a": {"tokens": 3}}, "share": 1, "nested": [[{"tokens": 1, "name": "x"}]]}
    record = checks.structured(values, Whole)
    assert record == Whole({"a": Part(3)}, 1, None, ((Part(1, "x"),),))
    assert isinstance(record.share, int)  # not converted, so that the record's text and hash stay the same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": {"a": {"tokens": "3"}}}, "parts['a'].tokens: got '3', wanted an integer"),
        ({"parts": {"a": {"tokens": True}}}, "parts['a'].tokens: got True, wanted an integer"),
        ({"parts": {"a": {}}}, "parts['a'].tokens: missing"),
        ({"parts": []}, "parts: got [], wanted an object"),
        ({"nested": 3}, "nested: got 3, wanted an array"),
        ({"nested": [{}]}, "nested[0]: got {}, wanted an array"),
        ({"parts": {"a": "x"}}, "parts['a']: got 'x', wanted an object"),
        ({"limit": "x"}, "limit: got 'x', wanted an integer"),
        ({"shares": 1}, "shares"),
        (3, "got 3, wanted an object"),
        (None, "got None, wanted an object"),
    ],
)
def test_wrong_values_are_named(change: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        checks.structured({"parts": {}} | change if isinstance(change, dict) else change, Whole)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_unknown_keys_are_ignored_on_request() -> None:
    assert checks.structured({"parts": {}, "later": 1}, Whole, unknown_keys=True) == Whole({})


def test_only_empty_fields_are_absent() -> None:
    assert all(checks.is_absent(value) for value in (None, "", " \n", [], {}))
    assert not any(checks.is_absent(value) for value in (0, 0.0, False, "0", [None], [[]], {"a": None}, float("nan")))


@attrs.frozen(kw_only=True)
class Inner:
    size: int
    kind: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"size": 1, "knid": "a"}, "unknown key 'knid'; did you mean 'kind'?"),
        ({"size": 1, "kind": "c"}, 'kind: got \'c\', wanted "a" or "b"'),
        ({}, "size: missing"),
    ],
)
def test_errors_in_json_values_are_readable(value: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as raised:
        checks.structured(value, Inner)
    assert str(raised.value) == problem
    assert checks.structured({"size": 1, "kind": "b"}, Inner) == Inner(size=1, kind="b")
