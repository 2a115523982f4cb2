"""trackio: writes to its SQLite database on this machine, in TRACKIO_DIR or its default folder.

Nothing is sent over the network.
"""

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from trackio.sqlite_storage import SQLiteStorage

from common.errors import BadInput, refusing
from reporting.trackers.tracker_sync import Store, TrackedRow, TrackedRun

# Any exception, because SQLite has its own errors for a full disk.
FAILURES = ("trackio", "fix this, then rerun the same command", (Exception,))


class TrackioRun(Store):
    """One run in trackio's database. Each call of `append` writes its rows in one transaction."""

    def __init__(self, run: TrackedRun):
        self._run, self._name = run, f"{run.name}-{run.identity}"

    def fingerprint(self) -> Any:
        with refusing(*FAILURES):
            return SQLiteStorage.get_log_count(self._run.project, self._name, run_id=self._run.identity)

    def begin(self, version: int) -> None:
        if self.fingerprint():
            with refusing(*FAILURES):
                deleted = SQLiteStorage.delete_run(self._run.project, self._name, run_id=self._run.identity)
            if not deleted:
                raise BadInput(
                    f"trackio: the earlier data of {self._name} could not be deleted; rerun the same command"
                )

    def append(self, rows: Sequence[TrackedRow]) -> None:
        events = [{"events": "; ".join(row.events)} if row.events else {} for row in rows]
        with refusing(*FAILURES):
            SQLiteStorage.bulk_log(
                self._run.project,
                self._name,
                [{**row.values, **event} for row, event in zip(rows, events, strict=True)],
                steps=[row.step for row in rows],
                timestamps=[datetime.fromtimestamp(row.time or 0.0, timezone.utc).isoformat() for row in rows],
                config=self._run.config or None,
                run_id=self._run.identity,
            )
