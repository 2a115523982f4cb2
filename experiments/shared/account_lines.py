"""Lines of an experiment's account, `account.jsonl`: calls, beats, jobs and ends, checked as they are read."""

from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.json_files import read_json_lines
from common.structure import structured
from experiments.shared.pool_job import PoolJob

ACCOUNT = "account.jsonl"


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


def read_account(directory: Path) -> list[AccountLine]:
    """Return the lines of an experiment's account, without torn ones. Raises BadInput for a damaged one."""
    path = directory / ACCOUNT
    found = read_json_lines(path)
    return [_line(path, number, record) for number, record in zip(found.numbers, found.records, strict=True)]


def _line(path: Path, number: int, record: dict[str, Any]) -> AccountLine:
    try:
        return structured(record, AccountLine)
    except ValueError as error:
        advice = "correct that line, or move the file away and count from nothing"
        raise BadInput(f"{path}: line {number}: {error}; {advice}") from error
