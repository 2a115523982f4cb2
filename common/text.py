"""Text for people: untrusted text on one line, values and lists in errors, sizes, dollars and durations.

An amount is never shown as zero unless it is zero, and different amounts are never shown as the same text. This module
also calculates costs: a machine's price per hour times its hours. An unknown price is None, and so are all amounts that
depend on it.
"""

import difflib
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from common.redaction import redacted

LARGEST_INTEGER = 1 << 53  # limit for options and keys, because every JSON parser is exact up to this integer
QUOTED_CHARACTERS = 100  # maximum length of a value in an error
BRACKET_CHARACTERS = 120  # maximum length of a library's message in an error
DECIMAL, BINARY = ("B", "KB", "MB", "GB", "TB", "PB"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
MOST_DIGITS = 15  # precision of a float in decimal digits
SMALLEST = 0.005  # smallest number that does not become zero when it is rounded to two decimals
NUMBER = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)([KMBT]?)")
MOST_POWER = 300  # power of ten of the largest number that is read
POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}  # suffix of a number -> power of ten


def printable(text: str) -> str:
    """Return untrusted text as one line. Line ends, surrogates, and control or invisible characters are escaped."""
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)


def quoted(value: Any) -> str:
    """Return the repr of a value for an error, shortened to QUOTED_CHARACTERS."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deeply nested, or an integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}... ({len(text):,} characters)"


def in_brackets(words: object) -> str:
    """Return a message from a library or a server as " (...)", to be appended to our own error.

    Return "" unless the message is one short line without secrets. Our own error already states what is wrong and
    what to do.
    """
    text = str(words).strip().rstrip(".")
    is_fit = 0 < len(text) <= BRACKET_CHARACTERS and "\n" not in text and redacted(text) == text
    return f" ({printable(text)})" if is_fit else ""


def closest(word: str, known_words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to a misspelled one; None if no similarity reaches the cutoff."""
    close = difflib.get_close_matches(word[:QUOTED_CHARACTERS], [*known_words], n=1, cutoff=cutoff)
    return close[0] if close else None


def nearest(word: str, known_words: Iterable[str]) -> str:
    """Return advice for an unknown word: the closest known word or, if none is close, all known words.

    The advice is meant to follow a semicolon.
    """
    names = sorted(known_words)
    close = closest(word, names, cutoff=0.5)
    return f"known: {', '.join(names)}" if close is None else f"did you mean '{close}'?"


def read_number(text: str) -> int | float | None:
    """Return the number that a user has written, such as 1e6, 1_000_000, 10M (ten million) or 1B; None for other text.

    A whole number is returned as an int, however it is written. A number that a float cannot represent is not read.
    """
    match = NUMBER.fullmatch(text)
    if match is None or len(text) > QUOTED_CHARACTERS:
        return None
    value = Decimal(match[1].replace("_", "")) * 10 ** POWERS[match[2]]
    if value.adjusted() > MOST_POWER:
        return None
    return int(value) if value == value.to_integral_value() else float(value)


def counted(count: int, noun: str) -> str:
    """Return a number and its noun, such as "1 document" or "2,500 documents". The plural must end in "s"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def either(words: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def integer_range(minimum: int, maximum: int) -> str:
    return f"of at least {minimum}, at most {'2^53' if maximum == LARGEST_INTEGER else f'{maximum:,}'}"


def readable_bytes(count: float, *, binary: bool = False, digits: int = 3) -> str:
    """Return a number of bytes in a suitable unit: "1.23 GB", "35.5 KB", "12 B".

    `digits` is the minimum number of digits. A number below one kilobyte has no decimals.
    """
    base, units = (1024, BINARY) if binary else (1000, DECIMAL)
    value, unit = float(count), 0
    while unit < len(units) - 1 and abs(value) >= base:
        value, unit = value / base, unit + 1
    if unit == 0:
        return f"{value:,.0f} B"
    integer_digits = len(f"{abs(value):.0f}")
    return f"{value:,.{max(0, digits - integer_digits)}f} {units[unit]}"


def distinct_bytes(*counts: float) -> list[str]:
    """Format byte counts for a message that compares them, with enough digits to distinguish different counts."""
    for digits in range(3, MOST_DIGITS):
        texts = [readable_bytes(count, digits=digits) for count in counts]
        if len({*texts}) == len({*counts}):
            return texts
    return [f"{count:,.0f} B" for count in counts]


def dollars(amount: float) -> str:
    """Return an amount with a dollar sign: "$1,234.50", or "$0.0042" for less than a cent."""
    return f"${small_number(amount)}"


def small_number(value: float) -> str:
    """Return a number with two decimals, or with two significant digits if it would be rounded to zero.

    Examples: "12.50", "0.0042".
    """
    if value == 0 or abs(value) >= SMALLEST:
        return f"{value:,.2f}"
    return f"{value:.2g}"


def duration(seconds: float) -> str:
    """Return a duration for people: 42s, 3m05s, 2h10m."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


def time_cost(seconds: float, price_per_hour: float | None) -> float | None:
    """Return the cost of a machine's time, in dollars; None if its price per hour is unknown."""
    return None if price_per_hour is None else price_per_hour * seconds / 3600


def paid_seconds(usd: float, price_per_hour: float) -> float:
    """Return how many seconds of a machine's time an amount pays for. This is the inverse of `time_cost`."""
    return usd / price_per_hour * 3600


def dollars_of_total(amount: float, total: float) -> str:
    """Return an amount for a column in which all amounts have the same number of decimals.

    There are two decimals, or four if the column's total is below a dollar.
    """
    return f"${amount:,.{2 if total >= 1 else 4}f}"


def dollars_at_most(amount: float) -> str:
    """Return an amount rounded up, so that a printed cost is never below the bill."""
    return f"${math.ceil(amount * 1e4 - 1e-6) / 1e4:.4f}"


def rough_number(value: float) -> str:
    """Return estimated hours or dollars with only three digits, because estimates are rough: "1.89", "18.9", "189"."""
    return f"{value:,.{2 if value < 10 else int(value < 100)}f}"
