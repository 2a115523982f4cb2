"""Command line of report.py: an option that would do nothing, and a run given twice, are usage errors."""

from pathlib import Path

import pytest

from common.arguments import UsageError
from reporting.command import ReportCommand

A, B = Path("a"), Path("b")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 5.0}, "--every goes with --watch"),
        ({"project": "x"}, "--project goes with"),
        ({"project": "x", "to": "tensorboard"}, "--project goes with"),
        ({"output": B, "to": "trackio"}, "leave out --output"),
        ({"no_samples": True, "to": "trackio"}, "leave out --output and --no-samples"),
        ({"runs": (A, B, Path("b/../a"))}, "a and b/../a are one run"),
        ({"runs": tuple(Path(f"run-{number}") for number in range(9))}, "got 9, wanted 8 at most"),
    ],
)
def test_what_would_do_nothing_is_a_usage_error(options: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        ReportCommand(**({"runs": (A,)} | options))  # type: ignore[arg-type]
