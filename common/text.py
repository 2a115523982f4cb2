"""Text for people: untrusted text on one line, values and lists in errors; sizes, dollars and durations.

An amount is never shown as zero unless it is zero, and amounts that differ are never shown by one text. Dollars are
counted here as well: a machine's price per hour times its hours. An unknown price is None, and so is what depends on
it.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from common.redaction import redacted

LARGEST_INTEGER = 1 << 53  # limit of options and keys: every JSON parser is exact up to it
QUOTED_CHARACTERS = 100  # shown of a value in an error
BRACKET_CHARACTERS = 120  # most of a library's words in an error
DECIMAL, BINARY = ("B", "KB", "MB", "GB", "TB", "PB"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
MOST_DIGITS = 15  # that a float has
SMALLEST = 0.005  # that two decimals show


def printable(text: str) -> str:
    """Return untrusted text as one line: line ends, control and invisible characters and surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)


def quoted(value: Any) -> str:
    """Return the repr of a value for an error, cut to QUOTED_CHARACTERS."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}... ({len(text):,} characters)"


def in_brackets(words: object) -> str:
    """Return the words of a library, or of somebody's server, as " (...)" that may end an error of ours.

    "" unless they are one short line that needs no redaction: an error says in our words what is wrong and what to do.
    """
    text = str(words).strip().rstrip(".")
    is_fit = 0 < len(text) <= BRACKET_CHARACTERS and "\n" not in text and redacted(text) == text
    return f" ({printable(text)})" if is_fit else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return advice for an unknown word, to follow a semicolon: the closest known word, or all known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:QUOTED_CHARACTERS], names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"


def either(words: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def integer_range(minimum: int, maximum: int) -> str:
    return f"of at least {minimum}, at most {'2^53' if maximum == LARGEST_INTEGER else f'{maximum:,}'}"


def readable_bytes(count: float, *, binary: bool = False, digits: int = 3) -> str:
    """Return a number of bytes in its own unit, with this many digits at least: "1.23 GB", "35.5 KB", "12 B"."""
    base, units = (1024, BINARY) if binary else (1000, DECIMAL)
    value, unit = float(count), 0
    while unit < len(units) - 1 and abs(value) >= base:
        value, unit = value / base, unit + 1
    if unit == 0:
        return f"{value:,.0f} B"
    whole = len(f"{abs(value):.0f}")
    return f"{value:,.{max(0, digits - whole)}f} {units[unit]}"


def distinct_bytes(*counts: float) -> list[str]:
    """Return numbers of bytes that are compared in a message: those that differ also differ as text."""
    for digits in range(3, MOST_DIGITS):
        texts = [readable_bytes(count, digits=digits) for count in counts]
        if len({*texts}) == len({*counts}):
            return texts
    return [f"{count:,.0f} B" for count in counts]


def dollars(amount: float) -> str:
    """Return an amount with its sign: "$1,234.50", and "$0.0042" for less than a cent."""
    return f"${small_number(amount)}"


def small_number(value: float) -> str:
    """Return a number with two decimals, or if that would be zero with two digits: "12.50", "0.0042"."""
    if value == 0 or abs(value) >= SMALLEST:
        return f"{value:,.2f}"
    return f"{value:.2g}"


def duration(seconds: float) -> str:
    """Return a duration for people: 42s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def time_cost(seconds: float, price_per_hour: float | None) -> float | None:
    """Return the cost of a machine's time, in dollars; None if its price per hour is unknown."""
    return None if price_per_hour is None else price_per_hour * seconds / 3600


def paid_seconds(usd: float, price_per_hour: float) -> float:
    """Return the seconds of a machine's time that an amount pays for: the inverse of `time_cost`."""
    return usd / price_per_hour * 3600


def dollars_of_total(amount: float, total: float) -> str:
    """Return a part of a total for a column of parts, all with the same decimals: more for a total below a dollar."""
    return f"${amount:,.{2 if total >= 1 else 4}f}"


def dollars_at_most(amount: float) -> str:
    """Return an amount rounded up: no printed cost is below the bill."""
    return f"${math.ceil(amount * 1e4 - 1e-6) / 1e4:.4f}"


def rough_number(value: float) -> str:
    """Return hours or dollars of an estimate, without more digits than it deserves: "1.89", "18.9", "189"."""
    return f"{value:,.{2 if value < 10 else int(value < 100)}f}"
