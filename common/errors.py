"""Errors: exit statuses, reasons, and the problems with the input of a user, as data."""

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
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it, in a command without checkpoints
EXIT_STOPPED = 75  # stopped early with a checkpoint: rerun the same command (EX_TEMPFAIL of sysexits.h)


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
