"""Lines of an experiment's account, `account.jsonl`: calls, beats, jobs and ends; damaged ones are left out."""

from pathlib import Path
from typing import Any

import attrs

from common.json_files import read_json_lines
from common.structure import structured
from experiments.shared.pool_job import PoolJob

ACCOUNT = "account.jsonl"
LONGEST_NAME = 255  # bytes of a file name
MOST = 1e15  # seconds, Unix time or dollars of a line that is not damaged


@attrs.frozen(kw_only=True)
class Spent:
    """Wall-clock time and cost."""

    seconds: float = 0.0
    usd: float = 0.0  # each call at its own price
    unpriced_seconds: float = 0.0  # not in `usd`


@attrs.frozen(kw_only=True)
class CallStart:
    """Start of a call of experiment.py."""

    began: float  # Unix time
    price_per_hour: float | None
    earlier: Spent  # by the calls before


@attrs.frozen(kw_only=True)
class AccountLine:
    """A line of a call; a beat where it says nothing but its time."""

    seconds: float  # age of the call
    call: CallStart | None = None  # the call begins
    run: str | None = None  # a job of this run begins, or without `job` ends
    job: PoolJob | None = None
    ended: bool = False  # the call ends


def read_account(directory: Path) -> tuple[list[AccountLine], list[str]]:
    """Return the lines of an experiment's account, and a note on those that are left out as damaged.

    Raises BadInput where it cannot be read at all.
    """
    found = read_json_lines(directory / ACCOUNT)
    lines = {number: _line(record) for record, number in zip(found.records, found.numbers, strict=True)}
    found = found.without([number for number, line in lines.items() if line is None])
    return [line for line in lines.values() if line is not None], found.notes()


def _line(record: dict[str, Any]) -> AccountLine | None:
    """Return a line; None for a damaged one."""
    try:
        line = structured(record, AccountLine)
    except ValueError:
        return None
    call, job = line.call, line.job
    numbers = [line.seconds] if job is None else [line.seconds, job.began, job.seconds or 0.0]
    if call is not None:
        numbers += [call.began, call.price_per_hour or 0.0, *attrs.astuple(call.earlier)]
    return line if _is_name(line.run or "run") and all(0 <= one <= MOST for one in numbers) else None


def _is_name(text: str) -> bool:
    """Tell whether a text can be the name of a run directory."""
    return text.isprintable() and "/" not in text and len(text.encode()) <= LONGEST_NAME
