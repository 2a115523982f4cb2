"""Errors: exit statuses, the reasons why a command ended, and problems with a user's input, as data."""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from common.redaction import redacted
from common.text import printable

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_DIVERGED = 3  # a loss or gradient was not finite; the update was not applied
EXIT_INTERRUPTED = 130  # Ctrl-C in a command without checkpoints; shells use the same number for Ctrl-C
EXIT_STOPPED = 75  # stopped early with a checkpoint; to continue, rerun the same command (EX_TEMPFAIL in sysexits.h)


# Why a command ended, in a form for programs: "reason" in exit.json. docs/checkpoints.md explains each reason.
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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a user's input, as data; `str` returns the line that the user sees.

    Code that makes a decision about a problem reads these fields, never the line. For a wrong value the line is
    "WHERE: KEY: got FOUND, wanted EXPECTED: CAUSE; ADVICE", without the parts that are empty. For any other problem,
    such as an unknown key, `text` describes it in words and replaces all parts between WHERE and ADVICE.
    """

    where: str = ""  # the file, option or place
    key: str = ""  # the key, option or parameter that is wrong
    found: str = ""
    expected: str = ""
    cause: str = ""  # why this value is expected
    text: str = ""
    advice: str = ""  # what to do next
    other_keys: tuple[str, ...] = ()  # the keys that contradict `key`

    def __str__(self) -> str:
        body = self.text
        if not body:
            values = (f"got {self.found}" if self.found else "", f"wanted {self.expected}" if self.expected else "")
            body = ": ".join(filter(None, (self.key, ", ".join(filter(None, values)), self.cause)))
        return "; ".join(filter(None, (": ".join(filter(None, (self.where, body))), self.advice)))

    def at(self, where: object, advice: str = "") -> "Problem":
        """Return a copy with `where` added before the place, and `advice` added after the existing advice."""
        places, all_advice = filter(None, (str(where), self.where)), filter(None, (self.advice, advice))
        return replace(self, where=": ".join(places), advice="; ".join(all_advice))


class InvalidValue(ValueError):
    """A value is wrong. The check that raises this does not know where the user gave the value.

    The code that reads the file or command line adds the place, and raises BadInput.
    """

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem = problem


class BadInput(Exception):
    """A user error: an invalid file, option or value. The message has one line per problem.

    File names and values may contain control characters and secrets; in the message, control characters are escaped
    and secrets are hidden. Normally all ranks of a job raise the error together and rank 0 prints it. With `alone`,
    only this rank raises it, and this rank prints it.
    """

    def __init__(self, *problems: Problem | str, alone: bool = False, reason: Reason = "user-error"):
        by_line: dict[str, Problem] = {}
        for problem in problems:
            fields = problem if isinstance(problem, Problem) else Problem(text=problem)
            by_line.setdefault(printable(redacted(str(fields))), fields)
        self.lines, self.problems = tuple(by_line), tuple(by_line.values())
        super().__init__(*problems)
        self.alone = alone
        self.reason = reason

    def __str__(self) -> str:
        return "\n".join(self.lines)


class UsageError(Exception):
    """A command line is wrong. The message is one line: what is wrong, and what was expected."""


class Diverged(Exception):
    """Training produced a loss or gradient that is not finite. The message names the step."""


def check_all(*checks: Callable[[], Any], earlier_error: BadInput | None = None) -> list[Any]:
    """Run all checks and return what they return, in the same order.

    If any check raises BadInput, or if there was an `earlier_error`, raise one BadInput with all their problems, so
    that the user sees all of them at once.
    """
    values: list[Any] = []
    errors = [] if earlier_error is None else [earlier_error]
    for check in checks:
        try:
            values.append(check())
        except BadInput as error:
            errors.append(error)
    if errors:
        raise joined(errors)
    return values


def joined(errors: Iterable[BadInput], *, alone: bool = False) -> BadInput:
    """Return one error with the problems of several errors, and with their common reason if there is one."""
    errors = [*errors]
    reasons = {error.reason for error in errors}
    problems = (problem for error in errors for problem in error.problems)
    return BadInput(*problems, alone=alone, reason=reasons.pop() if len(reasons) == 1 else "user-error")


def accepted(items: Iterable[Item], work: Callable[[Item], Value]) -> tuple[list[Value], list[Problem]]:
    """Apply `work` to each item of a user's list. Return the results, and the problems of the bad items.

    An item is bad if `work` raises BadInput for it. A bad item does not stop the rest: the caller continues with the
    good ones and raises BadInput when it has finished them.
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
    """If the block raises an error of one of the `kinds`, convert it to BadInput.

    The message consists of `where` (the place), the text of the error, and `advice`.
    """
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
    """Return the problem that an error describes: its own Problem if it has one, otherwise the first line of its text.

    For an OSError, the text is the system's reason, followed by the file's name unless `where` contains it.
    """
    if isinstance(error, InvalidValue):
        return error.problem
    text, file = (getattr(error, name, None) for name in ("strerror", "filename"))  # only an OSError has these
    text = text or str(error).partition("\n")[0] or type(error).__name__
    return Problem(text=text + (f": {file}" if file and str(file) not in str(where) else ""))


def reason_of_system_error(error: OSError) -> Reason:
    """Return the reason for exit.json if a command ended because a file could not be read or written."""
    return "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "user-error"
