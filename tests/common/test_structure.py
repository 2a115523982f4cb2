"""JSON values become attrs classes without conversion; what does not fit is named in one line."""

from typing import Any

import attrs
import pytest

from common.structure import structured


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
    whole = structured(values, Whole)
    assert whole == Whole({"a": Part(3)}, 1, None, ((Part(1, "x"),),))
    assert isinstance(whole.share, int)  # as JSON had it, so that its text and its hash stay the same


@pytest.mark.parametrize(
    ("change", "said"),
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
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        structured({"parts": {}} | change, Whole)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_unknown_keys_are_ignored_on_request() -> None:
    assert structured({"parts": {}, "later": 1}, Whole, unknown_keys=True) == Whole({})


def test_a_value_that_is_no_object_is_refused() -> None:
    for value in ([1], None, 3):
        with pytest.raises(ValueError, match=r"^got .*, wanted an object"):
            structured(value, Whole)
