"""Log of all trials, trials.jsonl: number, level and looks of each when it begins, and its verdict.

The log decides how much of the error each further trial may spend. A line that is damaged or edited is left out, and
counts as a trial: a later trial never gets a larger level because a line cannot be read.
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
WAIT_SECONDS = 60.0  # for another trial to write its line
MOST_TRIALS = 1_000_000
_LEVEL = number(0.0, ERROR)


def _are_looks(value: Any) -> bool:
    whole = all(integer(1, MOST_PAIRS).holds(look) for look in value)
    return whole and all(low < high for low, high in pairwise(value))


@attrs.frozen(kw_only=True)
class TrialLine:
    """A trial begins, with number and rule, or ends with a verdict."""

    trial: str = attrs.field(validator=text())
    number: int = attrs.field(default=0, validator=integer(0, MOST_TRIALS))
    level: float = attrs.field(default=0.0, validator=_LEVEL)
    looks: tuple[int, ...] = attrs.field(default=(), validator=ValueCheck(_are_looks, "rising numbers of pairs"))
    verdict: str | None = attrs.field(default=None, validator=optional(one_of(*VERDICTS)))

    def __attrs_post_init__(self) -> None:
        begins = (self.number > 0, self.level > 0, bool(self.looks))
        if any(begins) != all(begins) or any(begins) == (self.verdict is not None):
            raise ValueError("wanted number, level and looks, or a verdict")


@attrs.frozen
class TrialLog:
    """The lines of a log, and how many of its lines are left out."""

    lines: list[TrialLine]
    damaged: int

    def begun(self, name: str) -> TrialLine | None:
        """Return the line with which a trial has begun."""
        return next((line for line in self.lines if line.trial == name and line.looks), None)

    @property
    def next_number(self) -> int:
        """Number of the next trial. Damaged lines may have begun trials, so it is larger than all of them together."""
        begun = {line.trial for line in self.lines if line.looks}
        return 1 + max([len(begun) + self.damaged, *(line.number for line in self.lines)])

    @property
    def kept(self) -> int:
        """Number of trials that ended with "better". Of two verdicts on one trial the first counts."""
        verdicts: dict[str, str | None] = {}
        for line in self.lines:
            if line.verdict is not None:
                verdicts.setdefault(line.trial, line.verdict)
        return sum(verdict == "better" and self.begun(name) is not None for name, verdict in verdicts.items())


def read_trials(folder: Path) -> TrialLog:
    """Return the log of a folder, with a note on damaged lines. Raises BadInput where it cannot be read."""
    found = read_json_lines(folder / TRIALS, partial(structured, kind=TrialLine, unknown_keys=True))
    for notice in found.notes():
        show(note(f"{notice.text}; each counts as a trial"))
    return TrialLog(found.records, len(found.damaged))


def rule_of(log: TrialLog, name: str, pairs: int | None) -> tuple[int, TrialRule]:
    """Return number and rule of a trial, as begun, or as it would begin now. Raises BadInput for other pairs."""
    if (line := log.begun(name)) is not None:
        if pairs is not None and line.looks != (pairs,):
            looks = ", ".join(map(str, line.looks))
            advice = "their number is stated before the first; leave the option out"
            raise BadInput(f"--pairs {pairs}: {name} has begun with looks after {looks} pairs; {advice}")
        return line.number, TrialRule(level=line.level, looks=line.looks)
    return log.next_number, TrialRule.of(keep_level(log.next_number, log.kept), pairs)


def begin(folder: Path, name: str, pairs: int | None, about: dict[str, Any]) -> tuple[int, TrialRule]:
    """Return number and rule of a trial, and write them, with the keys of `about`, unless it has begun."""
    with _locked(folder) as log:
        number, rule = rule_of(log, name, pairs)
        if log.begun(name) is None:
            _append(folder, {"trial": name, "number": number, **attrs.asdict(rule), **about})
    return number, rule


def finish(folder: Path, name: str, verdict: str, text: str) -> None:
    """Write the verdict of a trial, unless it has one."""
    with _locked(folder) as log:
        if not any(line.trial == name and line.verdict for line in log.lines):
            _append(folder, {"trial": name, "verdict": verdict, "text": text})


@contextmanager
def _locked(folder: Path) -> Iterator[TrialLog]:
    with open_locked(folder / ".lock", f"{folder}: locked by another trial", wait_seconds=WAIT_SECONDS):
        yield read_trials(folder)


def _append(folder: Path, record: dict[str, Any]) -> None:
    with writing(folder / TRIALS), closing(JsonLog(folder / TRIALS)) as log:
        log.append(record | {"time": utc_now()}, durable=True)
