"""The log of all trials, trials.jsonl.

A trial writes a line with its number, level and looks when it starts, and a line with its verdict when it ends. The log
determines the part of the error probability that a new trial may spend. A damaged or edited line is skipped, but it
counts as a trial. Otherwise, one line that cannot be read would give all later trials a larger level.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from common.checks import ValueCheck, integer, number, one_of, optional, structured, text
from common.errors import BadInput
from common.files import open_locked, writing
from common.json_files import JsonLog, read_json_lines, utc_now
from common.output import note, show
from evaluation.shared.significance import ERROR
from experiments.trial.trial_rule import MOST_PAIRS, VERDICTS, TrialRule, keep_level

TRIALS = "trials.jsonl"
WAIT_SECONDS = 60.0  # how long to wait until another trial has written its line
MOST_TRIALS = 1_000_000
_LEVEL = number(0.0, ERROR)


def _are_looks(value: Any) -> bool:
    in_range = all(integer(1, MOST_PAIRS).holds(look) for look in value)
    return in_range and all(low < high for low, high in pairwise(value))


@attrs.frozen(kw_only=True)
class TrialLine:
    """A line of the log: the start of a trial, with its number and rule, or the end of a trial, with its verdict."""

    trial: str = attrs.field(validator=text())
    number: int = attrs.field(default=0, validator=integer(0, MOST_TRIALS))
    level: float = attrs.field(default=0.0, validator=_LEVEL)
    looks: tuple[int, ...] = attrs.field(default=(), validator=ValueCheck(_are_looks, "ascending numbers of pairs"))
    verdict: str | None = attrs.field(default=None, validator=optional(one_of(*VERDICTS)))

    def __attrs_post_init__(self) -> None:
        begins = (self.number > 0, self.level > 0, bool(self.looks))
        if any(begins) != all(begins) or any(begins) == (self.verdict is not None):
            raise ValueError('expected "number", "level" and "looks" together, or "verdict" alone')


@attrs.frozen
class TrialLog:
    """The readable lines of the log, and the number of damaged lines."""

    lines: list[TrialLine]
    damaged: int

    def first_line(self, name: str) -> TrialLine | None:
        """Return the line for the start of a trial, or None if it has not started."""
        return next((line for line in self.lines if line.trial == name and line.looks), None)

    @property
    def next_number(self) -> int:
        """The number of the next trial. Each damaged line may be the start of a trial, so it counts as a trial."""
        started_trials = {line.trial for line in self.lines if line.looks}
        return 1 + max([len(started_trials) + self.damaged, *(line.number for line in self.lines)])

    @property
    def gains(self) -> int:
        """The number of trials that ended with "better". If a trial has two verdicts, only the first counts."""
        verdicts: dict[str, str | None] = {}
        for line in self.lines:
            if line.verdict is not None:
                verdicts.setdefault(line.trial, line.verdict)
        return sum(verdict == "better" and self.first_line(name) is not None for name, verdict in verdicts.items())


def read_trials(folder: Path) -> TrialLog:
    """Return the log of a folder, and print a note about damaged lines. Raise BadInput if the log cannot be read."""
    log = read_json_lines(folder / TRIALS, partial(structured, kind=TrialLine, unknown_keys=True))
    for notice in log.notes():
        show(note(f"{notice.text}; each damaged line counts as a trial"))
    return TrialLog(log.records, len(log.damaged))


def rule_of(log: TrialLog, name: str, pairs: int | None) -> tuple[int, TrialRule]:
    """Return the number and the rule of a trial, or what these would be if the trial started now.

    Raise BadInput if the trial was started with a different number of pairs.
    """
    if (line := log.first_line(name)) is not None:
        if pairs is not None and line.looks != (pairs,):
            looks = ", ".join(map(str, line.looks))
            advice = "the number of pairs is fixed before the first pair; leave the option out"
            raise BadInput(f"--pairs {pairs}: {name} was started with looks after {looks} pairs; {advice}")
        return line.number, TrialRule(level=line.level, looks=line.looks)
    return log.next_number, TrialRule.of(keep_level(log.next_number, log.gains), pairs)


def begin(folder: Path, name: str, pairs: int | None, details: dict[str, Any]) -> tuple[int, TrialRule]:
    """Return a trial's number and rule. If the trial has not started, write both and the `details` to the log."""
    with _locked(folder) as log:
        number, rule = rule_of(log, name, pairs)
        if log.first_line(name) is None:
            _append(folder, {"trial": name, "number": number, **attrs.asdict(rule), **details})
    return number, rule


def finish(folder: Path, name: str, verdict: str, text: str) -> None:
    """Write the verdict of a trial to the log, unless the log already has it."""
    with _locked(folder) as log:
        if not any(line.trial == name and line.verdict for line in log.lines):
            _append(folder, {"trial": name, "verdict": verdict, "text": text})


@contextmanager
def _locked(folder: Path) -> Iterator[TrialLog]:
    contention = f"{folder}: another trial is still writing to the log after {WAIT_SECONDS:.0f} s; try again"
    with open_locked(folder / ".lock", contention, wait_seconds=WAIT_SECONDS):
        yield read_trials(folder)


def _append(folder: Path, record: dict[str, Any]) -> None:
    with writing(folder / TRIALS), closing(JsonLog(folder / TRIALS)) as log:
        log.append(record | {"time": utc_now()}, durable=True)
