"""Untrusted text is escaped and shortened; the nearest known word is suggested; different amounts look different."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BadInput
from common.text import (
    counted,
    distinct_bytes,
    dollars,
    dollars_at_most,
    dollars_of_total,
    duration,
    nearest,
    paid_seconds,
    printable,
    quoted,
    readable_bytes,
    rough_number,
    time_cost,
)


def test_sizes_have_suitable_units() -> None:
    texts = [readable_bytes(count) for count in (0, 1, 999, 1000, 35_512, 1.234e9, 21e9, 5e18)]
    assert texts == ["0 B", "1 B", "999 B", "1.00 KB", "35.5 KB", "1.23 GB", "21.0 GB", "5,000 PB"]
    assert readable_bytes(64 << 20, binary=True) == "64.0 MiB"


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_different_amounts_have_different_texts(first: int, second: int) -> None:
    first_text, second_text = distinct_bytes(first, second)
    assert (first_text == second_text) == (first == second)
    assert not first_text.startswith("0") or first == 0


def test_small_amounts_are_not_zero() -> None:
    assert [dollars(amount) for amount in (0, 0.00042, 0.004, 0.01, 12.5, 1234.567)] == [
        "$0.00",
        "$0.00042",
        "$0.004",
        "$0.01",
        "$12.50",
        "$1,234.57",
    ]


def test_control_characters_in_names_are_escaped() -> None:
    name = "a\x1b[2Jb\nc\u202ed\udcff\x00"
    assert printable(name) == "a\\x1b[2Jb\\nc\\u202ed\\udcff\\x00"
    assert str(BadInput(name)) == printable(name)
    assert printable("Größe 模型") == "Größe 模型"


def test_long_values_in_errors_are_shortened() -> None:
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


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_costs_need_a_known_price() -> None:
    assert time_cost(1800, 14.32) == 7.16 and time_cost(0, 14.32) == 0 and time_cost(1800, None) is None
    assert paid_seconds(7.16, 14.32) == 1800
    texts = [dollars_of_total(0.25, total) for total in (0.5, 1, 2000)]
    assert texts == ["$0.2500", "$0.25", "$0.25"]
    assert [dollars_at_most(amount) for amount in (0, 0.00001, 1.23456)] == ["$0.0000", "$0.0001", "$1.2346"]
    assert [rough_number(value) for value in (0.5, 9.994, 18.94, 1234.5)] == ["0.50", "9.99", "18.9", "1,234"]


def test_one_thing_is_singular() -> None:
    assert [counted(number, "document") for number in (0, 1, 2500)] == ["0 documents", "1 document", "2,500 documents"]
