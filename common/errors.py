"""Errors: exit statuses, user errors, dropped output and advice, and escaping of untrusted text."""

import difflib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from common.redaction import redacted

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_DIVERGED = 3  # a loss or gradient was not finite; the update was not applied
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it, in a command without checkpoints
EXIT_STOPPED = 75  # stopped early with a checkpoint: rerun the same command (EX_TEMPFAIL of sysexits.h)

LARGEST_INTEGER = 1 << 53  # limit of options and keys: every JSON parser is exact up to it
QUOTED_CHARACTERS = 100  # shown of a value in an error
BRACKET_CHARACTERS = 120  # most of a library's words in an error

Item = TypeVar("Item")
Value = TypeVar("Value")

_dropped: dict[str, str | None] = {}  # first problem of each kind of output or advice; None: reported


class BadInput(Exception):
    """User error: an invalid file, option or value. The message is one line: place, got, wanted, next step.

    Control characters in it, which names of files or values may contain, are escaped, and secrets in it are hidden.
    Several problems are a line each.
    All ranks of a job raise it together and rank 0 prints it, unless `alone`: then this rank prints it.
    """

    def __init__(self, *problems: str, alone: bool = False):
        self.problems = tuple(dict.fromkeys(printable(redacted(problem)) for problem in problems))
        super().__init__("\n".join(self.problems))
        self.alone = alone


class Diverged(Exception):
    """Training produced a loss or gradient that is not finite. The message names the step."""


def check_all(*checks: Callable[[], Any], known: Iterable[str] = ()) -> list[Any]:
    """Return the values of all checks; raise one BadInput with the known problems and those of checks that raise it."""
    values: list[Any] = []
    problems = [*known]
    for check in checks:
        try:
            values.append(check())
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(*problems)
    return values


def accepted(items: Iterable[Item], work: Callable[[Item], Value]) -> tuple[list[Value], list[str]]:
    """Return `work` of each item of a list that a user gave, and the problems of those for which it raises BadInput.

    One bad item does not stop the others: the caller goes on with the good ones, and raises BadInput at its end.
    """
    values: list[Value] = []
    problems: list[str] = []
    for item in items:
        try:
            values.append(work(item))
        except BadInput as error:
            if error.alone:
                raise
            problems += error.problems
    return values, problems


@contextmanager
def refusing(where: object, advice: str = "", kinds: tuple[type[BaseException], ...] = (ValueError,)) -> Iterator[None]:
    """Raise an error of the block, of these kinds, as BadInput: the place, the error's text, and advice."""
    try:
        yield
    except kinds as error:
        text, file = (getattr(error, name, None) for name in ("strerror", "filename"))  # of an OSError
        text = text or str(error).partition("\n")[0] or type(error).__name__
        text += f": {file}" if file and str(file) not in str(where) else ""
        raise BadInput(f"{where}: {text}" + (f"; {advice}" if advice else "")) from error


def in_brackets(words: object) -> str:
    """Return the words of a library, or of somebody's server, as " (...)" that may end an error of ours.

    "" unless they are one short line that needs no redaction: an error says in our words what is wrong and what to do.
    """
    text = str(words).strip().rstrip(".")
    is_fit = 0 < len(text) <= BRACKET_CHARACTERS and "\n" not in text and redacted(text) == text
    return f" ({printable(text)})" if is_fit else ""


@contextmanager
def advisory(name: str, *fatal: type[Exception]) -> Iterator[None]:
    """Context, or decorator, of work that informs: its exceptions, but `fatal` ones, are noted once and end nothing."""
    try:
        yield
    except fatal:
        raise
    except Exception as error:  # noqa: BLE001  # of formatting, arithmetic, a drawing: training goes on without
        line = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {error}"
        if drop(name, problem):
            print(f"WARNING: {name}: dropped: {printable(redacted(problem))}", file=sys.stderr, flush=True)


def drop(name: str, problem: str) -> bool:
    """Note once, for the metrics, dropped work and the reason; return True the first time."""
    first = name not in _dropped
    _dropped.setdefault(name, redacted(problem))
    return first


def newly_dropped() -> Iterator[tuple[str, str]]:
    """Yield (name, problem) of work dropped since the last call."""
    for name, problem in [*_dropped.items()]:
        if problem is not None:
            _dropped[name] = None
            yield name, problem


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known word, or the list of known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:QUOTED_CHARACTERS], names, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names)}"


def printable(text: str) -> str:
    """Return untrusted text as one line: line ends, control and invisible characters and surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)


def say(line: str) -> None:
    """Print untrusted text as a line on stderr, without secrets."""
    print(printable(redacted(line)), file=sys.stderr)


def printable_lines(text: str) -> str:
    """Return text of several lines for a terminal or a log, each as `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def either(words: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def integer_range(minimum: int, maximum: int) -> str:
    return f"of at least {minimum}, at most {'2^53' if maximum == LARGEST_INTEGER else f'{maximum:,}'}"


def quoted(value: Any) -> str:
    """Return the repr of a value for an error, cut to QUOTED_CHARACTERS."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}... ({len(text):,} characters)"
