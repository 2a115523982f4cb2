"""Quantities as text: no zero for what is not zero, and other texts for other amounts."""

from hypothesis import given
from hypothesis import strategies as st

from common.quantities import distinct_bytes, dollars, readable_bytes


def test_a_size_has_the_unit_that_shows_it() -> None:
    texts = [readable_bytes(count) for count in (0, 1, 999, 1000, 35_512, 1.234e9, 21e9, 5e18)]
    assert texts == ["0 B", "1 B", "999 B", "1.00 KB", "35.5 KB", "1.23 GB", "21.0 GB", "5,000 PB"]
    assert readable_bytes(64 << 20, binary=True) == "64.0 MiB"


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_amounts_that_differ_are_other_texts(first: int, second: int) -> None:
    one, other = distinct_bytes(first, second)
    assert (one == other) == (first == second)
    assert not one.startswith("0") or first == 0


def test_small_amounts_are_not_zero() -> None:
    assert [dollars(amount) for amount in (0, 0.00042, 0.004, 0.01, 12.5, 1234.567)] == [
        "$0.00",
        "$0.00042",
        "$0.004",
        "$0.01",
        "$12.50",
        "$1,234.57",
    ]
