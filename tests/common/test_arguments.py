"""Numbers on a command line: in range, or one line of error."""

import argparse

import pytest

from common.arguments import number, whole_number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "1e3", "9" * 5000, str(10**30), "11"])
def test_a_whole_number_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a whole number of at least 1, at most 10"):
        whole_number(1, 10)(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e999", "x", "1"])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a number above 0 and below 1"):
        number(0, 1, above=True)(text)


def test_numbers_in_range_are_taken() -> None:
    assert whole_number(1)("8") == 8
    assert number(0)("0") == 0.0
    assert number(0, above=True, example="14.32")("14.32") == 14.32


@pytest.mark.parametrize("text", ["14,32", "$14", "nan", "inf", "0", "-1"])
def test_a_limit_that_is_no_number_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"wanted a number above 0, such as 14\.32"):
        number(0, above=True, example="14.32")(text)
