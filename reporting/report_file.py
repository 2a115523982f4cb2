"""File of a report: written whole, in the place of an earlier report and of nothing else."""

from pathlib import Path

from common.errors import BadInput
from common.files import replace_file, writing
from common.json_files import read_regular

SIGN = b"Lockstep's <code>report.py</code>"  # on every page of a report


def check_replaceable(file: Path) -> None:
    """Raise BadInput where a path names anything but an earlier report, an empty file, or nothing."""
    try:
        content = read_regular(file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror or error}; pass the name of a file as --output") from error
    if content and SIGN not in content:
        raise BadInput(f"{file}: is not a report of report.py, and is left as it is; pass another --output")


def write_report(file: Path, page: str) -> None:
    """Write a page atomically; what is not Unicode, such as a name of bytes, is escaped. Raises BadInput."""
    with writing(file):
        replace_file(file, page.encode(errors="backslashreplace"))
