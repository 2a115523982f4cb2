"""Log of all trials, trials.jsonl: number, level and looks of each when it begins, and its verdict."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from common.checks import structured
from common.errors import BadInput
from common.files import open_locked, writing
from common.json_files import JsonLog, read_json_lines, utc_now
from experiments.trial.trial_rule import TrialRule, keep_level

TRIALS = "trials.jsonl"
WAIT_SECONDS = 60.0  # for another trial to write its line


@attrs.frozen(kw_only=True)
class TrialLine:
    """A trial begins, with number and rule, or ends with a verdict."""

    trial: str
    number: int = 0
    level: float = 0.0
    looks: tuple[int, ...] = ()
    verdict: str | None = None


def read_trials(folder: Path) -> list[TrialLine]:
    """Return the log of a folder. Raises BadInput where it cannot be read."""
    return read_json_lines(folder / TRIALS, partial(structured, kind=TrialLine, unknown_keys=True)).noted()


def rule_of(lines: list[TrialLine], name: str, pairs: int | None) -> tuple[int, TrialRule]:
    """Return number and rule of a trial, as begun, or as it would begin now. Raises BadInput for other pairs."""
    if (line := _begun(lines, name)) is not None:
        if pairs is not None and line.looks != (pairs,):
            looks = ", ".join(map(str, line.looks))
            advice = "their number is stated before the first; leave the option out"
            raise BadInput(f"--pairs {pairs}: {name} has begun with looks after {looks} pairs; {advice}")
        return line.number, TrialRule(level=line.level, looks=line.looks)
    number = 1 + max((line.number for line in lines), default=0)  # a damaged line counts by those after it
    kept = len({line.trial for line in lines if line.verdict == "better"})
    return number, TrialRule.of(keep_level(number, kept), pairs)


def begin(folder: Path, name: str, pairs: int | None, about: dict[str, Any]) -> tuple[int, TrialRule]:
    """Return number and rule of a trial, and write them, with the keys of `about`, unless it has begun."""
    with _locked(folder) as lines:
        number, rule = rule_of(lines, name, pairs)
        if _begun(lines, name) is None:
            _append(folder, {"trial": name, "number": number, **attrs.asdict(rule), **about})
    return number, rule


def finish(folder: Path, name: str, verdict: str, text: str) -> None:
    """Write the verdict of a trial, unless it has one."""
    with _locked(folder) as lines:
        if not any(line.trial == name and line.verdict for line in lines):
            _append(folder, {"trial": name, "verdict": verdict, "text": text})


def _begun(lines: list[TrialLine], name: str) -> TrialLine | None:
    return next((line for line in lines if line.trial == name and line.looks), None)


@contextmanager
def _locked(folder: Path) -> Iterator[list[TrialLine]]:
    with open_locked(folder / ".lock", f"{folder}: locked by another trial", wait_seconds=WAIT_SECONDS):
        yield read_trials(folder)


def _append(folder: Path, record: dict[str, Any]) -> None:
    with writing(folder / TRIALS), closing(JsonLog(folder / TRIALS)) as log:
        log.append(record | {"time": utc_now()}, durable=True)
