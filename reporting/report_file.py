"""File of a report: written whole, in the place of an earlier report and of nothing else."""

from pathlib import Path

from common.files import check_replaceable, replace_file, writing

SIGN = b"Lockstep's <code>report.py</code>"  # on every page of a report


def check_report(file: Path) -> None:
    """Raise BadInput where a path names anything but an earlier report, an empty file, or nothing."""
    check_replaceable(file, SIGN, "a report of report.py", "--output")


def write_report(file: Path, page: str) -> None:
    """Write a page atomically; what is not Unicode, such as a name of bytes, is escaped. Raises BadInput."""
    with writing(file):
        replace_file(file, page.encode(errors="backslashreplace"))
