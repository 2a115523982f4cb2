"""Account of an experiment: its wall-clock time and cost over all calls, in `account.jsonl`, kills included.

The machine costs while a call lives, and while jobs of a killed call live on. A call writes when it began, a beat every
few seconds, each job that it starts, and its end. Without an end it counts to its last beat, or to what its jobs wrote
last where that is later, and BEAT_SECONDS more: never less than was paid. While such a job still trains, to now.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from common.files import writing
from common.json_files import JsonLog, read_json_lines
from experiments.shared.pool_options import PoolOptions
from training.launch import job_seconds
from training.planning.budget import Budget
from training.supervision.exit_record import EXIT_FILE
from training.telemetry.metrics_log import METRICS
from training.telemetry.progress_bar import duration

ACCOUNT = "account.jsonl"
BEAT_SECONDS = 5.0


@attrs.frozen(kw_only=True)
class Spent:
    """Wall-clock time and cost."""

    seconds: float = 0.0
    usd: float = 0.0  # each call at its own price
    unpriced_seconds: float = 0.0  # not in `usd`


class Account:
    """The account of one call, and of those before it. Only the call that has locked the experiment opens it."""

    def __init__(self, directory: Path, options: PoolOptions, *, jobs_live: bool):
        """Count the earlier calls, and begin this one. `jobs_live`: a job of an earlier call still trains."""
        path = directory / ACCOUNT
        lines = read_json_lines(path).records if path.exists() else []
        self._options, age = options, job_seconds()
        self.price_per_hour = options.price_per_hour
        self._began, began = time.monotonic() - age, time.time() - age
        self.earlier = _spent_before(lines, began, _last_written(directory), jobs_live=jobs_live)
        held = {line["run"]: line["devices"] for line in lines if "run" in line}
        # by runs whose jobs were not seen to end
        self.devices: dict[str, list[str]] = {run: devices for run, devices in held.items() if devices is not None}
        with writing(path):
            self._log = JsonLog(path)
        self._beaten = 0.0
        self._write({"began": began, "price_per_hour": self.price_per_hour, "earlier": attrs.asdict(self.earlier)})

    def call_seconds(self) -> float:
        """Return the age of this call."""
        return time.monotonic() - self._began

    def elapsed_seconds(self) -> float:
        return self.earlier.seconds + self.call_seconds()

    def usd(self) -> float | None:
        """Return the cost so far; None without a price. Calls without a price count at that of this one."""
        if self.price_per_hour is None:
            return None
        return self.earlier.usd + self.price_per_hour * (self.earlier.unpriced_seconds + self.call_seconds()) / 3600

    def seconds_left(self) -> float | None:
        """Return the wall-clock seconds until the first limit; None without limits."""
        left = Budget(max_hours=self._options.max_hours, max_usd=self._options.max_usd).seconds_left(self)
        return None if left is None else left[0]

    def describe(self) -> str:
        """Return what is spent, and of what, as text."""
        options, usd = self._options, self.usd()
        text = duration(self.elapsed_seconds())
        if options.max_hours is not None:
            text += f" of {duration(options.max_hours * 3600)}"
        if usd is not None:
            text += f", ${usd:,.2f}" + ("" if options.max_usd is None else f" of ${options.max_usd:,.2f}")
        return text

    def beat(self) -> None:
        """Write a beat, if the last one is old enough."""
        if self.call_seconds() - self._beaten >= BEAT_SECONDS:
            self._write({})

    def started(self, run: str, devices: list[str]) -> None:
        """Write the start of a job, and the devices that it holds."""
        self.devices[run] = devices
        self._write({"run": run, "devices": devices})

    def ended(self, run: str) -> None:
        """Write the end of a job."""
        self.devices.pop(run, None)
        self._write({"run": run, "devices": None})

    def close(self) -> None:
        self._write({"ended": True})
        self._log.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._beaten = self.call_seconds()
        with writing(self._log.path):
            self._log.append({**record, "seconds": round(self._beaten, 3)}, durable=True)


def _spent_before(lines: Sequence[dict[str, Any]], began: float, last_written: float, *, jobs_live: bool) -> Spent:
    """Return what the calls before the one that `began` have spent. `last_written`: by their jobs; Unix times."""
    first = max((index for index, line in enumerate(lines) if "began" in line), default=None)
    if first is None:
        return Spent()
    call, end = lines[first], lines[-1]
    seconds, longest = end["seconds"], max(began - call["began"], end["seconds"])
    if not end.get("ended"):
        last = longest if jobs_live else max(seconds, last_written - call["began"]) + BEAT_SECONDS
        seconds = min(last, longest)
    price, before = call["price_per_hour"], Spent(**call["earlier"])
    return Spent(
        seconds=before.seconds + seconds,
        usd=before.usd + (0.0 if price is None else price * seconds / 3600),
        unpriced_seconds=before.unpriced_seconds + (seconds if price is None else 0.0),
    )


def _last_written(directory: Path) -> float:
    """Return when a job of the experiment last wrote metrics or an exit record, Unix time; 0 where none has."""
    files = [path for name in (METRICS, EXIT_FILE) for path in directory.glob(f"*/{name}")]
    return max((path.stat().st_mtime for path in files), default=0.0)
