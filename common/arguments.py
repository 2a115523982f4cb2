"""Command-line values: checked numbers for argparse, and output streams that print any file name."""

import argparse
import math
import sys
from collections.abc import Callable

from common.errors import LARGEST_INTEGER, integer_range, quoted


def whole_number(minimum: int, maximum: int = LARGEST_INTEGER) -> Callable[[str], int]:
    """Return an argparse type: an integer in [minimum, maximum]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            wanted = f"a whole number {integer_range(minimum, maximum)}"
            raise argparse.ArgumentTypeError(f"got {quoted(text)}, wanted {wanted}")
        return value

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False, example: str = "") -> Callable[[str], float]:
    """Return an argparse type: a finite number in [low, high), or in (low, high) when `above`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not ((value > low if above else value >= low) and value < high):
            wanted = f"a number {'above' if above else 'from'} {low:g}" + (
                f" and below {high:g}" if high < math.inf else ""
            )
            raise argparse.ArgumentTypeError(
                f"got {quoted(text)}, wanted {wanted}" + (f", such as {example}" if example else "")
            )
        return value

    return parse


def print_any_name() -> None:
    """Have stdout and stderr escape what they cannot encode, such as a file name that is not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
