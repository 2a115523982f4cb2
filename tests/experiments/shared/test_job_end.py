"""The end of a job: the recorded reason shows whether the budget ended the job.

If no reason is recorded, the remaining budget decides.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from experiments.shared.job_end import LEAST_SECONDS, ended_over_budget, failure_of


@pytest.mark.parametrize(
    ("status", "reason", "stopped_by", "seconds_left", "is_over"),
    [
        (EXIT_STOPPED, "out-of-budget", None, None, True),
        (EXIT_STOPPED, "stopped", "--max-hours", 0.0, False),
        (EXIT_ERROR, "crash", None, 0.0, False),
        (EXIT_STOPPED, None, "--max-hours", 99.0, True),  # earlier versions of train.py wrote no reason
        (EXIT_STOPPED, None, "signal", 0.0, False),
        (EXIT_ERROR, None, None, LEAST_SECONDS - 1, True),
        (EXIT_ERROR, None, None, LEAST_SECONDS, False),
        (EXIT_ERROR, None, None, None, False),
    ],
)
def test_reason_shows_whether_the_budget_ended_a_job(
    status: int, reason: str | None, stopped_by: str | None, seconds_left: float | None, *, is_over: bool
) -> None:
    end: Any = SimpleNamespace(status=status, reason=reason)
    progress: Any = SimpleNamespace(stopped_by=stopped_by)
    assert ended_over_budget(end, progress, seconds_left) is is_over


def test_a_failure_names_the_run_and_the_next_step() -> None:
    target: Any = SimpleNamespace(name="base", step=8, directory=Path("runs/base"))
    end: Any = SimpleNamespace(status=EXIT_ERROR, problem="rank 0: killed")
    log = Path("runs/base/job.log")
    assert failure_of(target, end, log) == "base: training failed: rank 0: killed; see its output in runs/base/job.log"
    assert "move runs/base away" in failure_of(target, SimpleNamespace(status=EXIT_DONE), log)  # type: ignore[arg-type]
