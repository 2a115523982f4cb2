"""File of a report: an earlier report is replaced, any other file is left as it is."""

import os
from pathlib import Path

import pytest

from common.errors import BadInput
from reporting.report_file import check_report, write_report
from reporting.report_page import report_page
from reporting.run_history import read_history
from tests.reporting.written_runs import training, write_run


def test_an_earlier_report_an_empty_file_and_nothing_are_replaced(tmp_path: Path) -> None:
    run, file = write_run(tmp_path / "run", training()), tmp_path / "x.html"
    check_report(file)
    file.write_text("")
    check_report(file)
    write_report(file, report_page([run], [read_history(run)], []))
    check_report(file)


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.json", ".", "pipe"])
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", training())
    os.mkfifo(run / "pipe")
    with pytest.raises(BadInput, match="--output"):
        check_report(run / name)


def test_a_name_that_is_not_unicode_is_shown_escaped(tmp_path: Path) -> None:
    write_report(tmp_path / "x", "a \udcff \ud83d é")
    assert (tmp_path / "x").read_text() == "a \\udcff \\ud83d é"
