"""Errors: exit statuses, user errors, dropped output and advice, and escaping of untrusted text."""

import difflib
import errno
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

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

# Why a command ended, for programs: `reason` in exit.json. docs/checkpoints.md says what each one means.
Reason = Literal[
    "finished",
    "stopped",
    "out-of-budget",
    "non-finite",
    "user-error",
    "usage-error",
    "check-failed",
    "out-of-memory",
    "disk-full",
    "lost-rank",
    "failed-rank",
    "crash",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

Item = TypeVar("Item")
Value = TypeVar("Value")

_dropped: dict[str, str | None] = {}  # first problem of each kind of output or advice; None: reported


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with what a user gave, as data; `str` returns the line that the user sees.

    Code that decides something about a problem reads these fields, never the line. The line of a wrong value is
    "WHERE: KEY: got FOUND, wanted EXPECTED: CAUSE; ADVICE", without the parts that are empty. Where something else is
    wrong, such as an unknown key, `text` says it in words, in the place of all parts between WHERE and ADVICE.
    """

    where: str = ""  # the file, option or place
    key: str = ""  # the key, option or parameter that is wrong
    found: str = ""
    expected: str = ""
    cause: str = ""  # why that is expected
    text: str = ""
    advice: str = ""  # what to do next
    other_keys: tuple[str, ...] = ()  # that contradict `key`

    def __str__(self) -> str:
        body = self.text
        if not body:
            values = (f"got {self.found}" if self.found else "", f"wanted {self.expected}" if self.expected else "")
            body = ": ".join(filter(None, (self.key, ", ".join(filter(None, values)), self.cause)))
        return "; ".join(filter(None, (": ".join(filter(None, (self.where, body))), self.advice)))

    def at(self, where: object, advice: str = "") -> "Problem":
        """Return it with a place before the one that it has, and more advice at its end."""
        places, advices = filter(None, (str(where), self.where)), filter(None, (self.advice, advice))
        return replace(self, where=": ".join(places), advice="; ".join(advices))


class InvalidValue(ValueError):
    """A wrong value, found by a check that does not know where the user gave it; readers add that, as BadInput."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem = problem


class BadInput(Exception):
    """User error: an invalid file, option or value. The message is a line for each problem.

    Control characters in it, which names of files or values may contain, are escaped, and secrets in it are hidden.
    All ranks of a job raise it together and rank 0 prints it, unless `alone`: then this rank prints it.
    """

    def __init__(self, *problems: Problem | str, alone: bool = False, reason: Reason = "user-error"):
        by_line: dict[str, Problem] = {}
        for problem in problems:
            as_data = problem if isinstance(problem, Problem) else Problem(text=problem)
            by_line.setdefault(printable(redacted(str(as_data))), as_data)
        self.lines, self.problems = tuple(by_line), tuple(by_line.values())
        super().__init__(*problems)
        self.alone = alone
        self.reason = reason

    def __str__(self) -> str:
        return "\n".join(self.lines)


class UsageError(Exception):
    """A command line that is wrong. The message is one line: what is wrong, and what was wanted."""


class Diverged(Exception):
    """Training produced a loss or gradient that is not finite. The message names the step."""


def check_all(*checks: Callable[[], Any], known: BadInput | None = None) -> list[Any]:
    """Return the values of all checks; raise one BadInput with the known problems and those of checks that raise it."""
    values: list[Any] = []
    errors = [] if known is None else [known]
    for check in checks:
        try:
            values.append(check())
        except BadInput as error:
            errors.append(error)
    if errors:
        raise joined(errors)
    return values


def joined(errors: Iterable[BadInput], *, alone: bool = False) -> BadInput:
    """Return one error with the problems of several. Its reason is theirs if they have the same one."""
    errors = [*errors]
    reasons = {error.reason for error in errors}
    problems = (problem for error in errors for problem in error.problems)
    return BadInput(*problems, alone=alone, reason=reasons.pop() if len(reasons) == 1 else "user-error")


def accepted(items: Iterable[Item], work: Callable[[Item], Value]) -> tuple[list[Value], list[Problem]]:
    """Return `work` of each item of a list that a user gave, and the problems of those for which it raises BadInput.

    One bad item does not stop the others: the caller goes on with the good ones, and raises BadInput at its end.
    """
    values: list[Value] = []
    problems: list[Problem] = []
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
        reason: Reason = "user-error"
        if isinstance(error, BadInput):
            problems, reason = error.problems, error.reason
        else:
            problems = (problem_of(error, where),)
        raise BadInput(*(problem.at(where, advice) for problem in problems), reason=reason) from error


def problem_of(error: BaseException, where: object = "") -> Problem:
    """Return what an error says is wrong: as data where it has that, else the first line of its text.

    Of an OSError that is the system's reason, with the file's name unless `where` contains that.
    """
    if isinstance(error, InvalidValue):
        return error.problem
    text, file = (getattr(error, name, None) for name in ("strerror", "filename"))  # of an OSError
    text = text or str(error).partition("\n")[0] or type(error).__name__
    return Problem(text=text + (f": {file}" if file and str(file) not in str(where) else ""))


def reason_of_system_error(error: OSError) -> Reason:
    """Return why a command ends that could not read or write a file."""
    return "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "user-error"


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
            say(warning(f"{name}: dropped: {problem}"))


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
    """Return advice for an unknown word, to follow a semicolon: the closest known word, or all known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:QUOTED_CHARACTERS], names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"


def printable(text: str) -> str:
    """Return untrusted text as one line: line ends, control and invisible characters and surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)


class Severity(Enum):
    """How much a line matters. It alone decides where the line is printed; the value is the label before it."""

    RESULT = ""  # what the command was asked for: stdout
    NOTE = "NOTE: "  # stderr, as WARNING
    WARNING = "WARNING: "


@dataclass(frozen=True)
class Notice:
    """A line for people. `str` returns it with its label."""

    text: str
    severity: Severity

    def __str__(self) -> str:
        return f"{self.severity.value}{self.text}"


def note(text: str) -> Notice:
    """Return a notice of something that the user might not expect."""
    return Notice(text, Severity.NOTE)


def warning(text: str) -> Notice:
    """Return a notice of something that is probably wrong, but does not end the command."""
    return Notice(text, Severity.WARNING)


def say(line: str | Notice) -> None:
    """Print untrusted text as a line on stderr, without secrets."""
    print(printable(redacted(str(line))), file=sys.stderr, flush=True)


def show(lines: Iterable[str | Notice]) -> None:
    """Print untrusted lines: notices as their severity says, other lines are results."""
    for line in lines:
        if isinstance(line, Notice) and line.severity is not Severity.RESULT:
            say(line)
        else:
            print(printable(str(line)), flush=True)


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
