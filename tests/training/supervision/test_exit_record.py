"""Exit record: written once, removed by the next job, read by a restarted group."""

import json
from pathlib import Path

import pytest

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, BadInput
from training.supervision.exit_record import EXIT_FILE, LOST, NODE_VARIABLE, ExitRecord, final_status


def read(run: Path) -> dict[str, object]:
    return json.loads((run / EXIT_FILE).read_text())


@pytest.mark.parametrize(
    ("status", "outcome", "kept"),
    [
        (EXIT_DONE, "done", None),
        (EXIT_ERROR, "error", None),
        (EXIT_DIVERGED, "diverged", EXIT_DIVERGED),
        (EXIT_STOPPED, "stopped", EXIT_STOPPED),
    ],
)
def test_each_status_has_its_outcome_and_a_restart_keeps_a_final_stop_or_divergence(
    tmp_path: Path, status: int, outcome: str, kept: int | None
) -> None:
    assert final_status(tmp_path) is None
    for final in (False, True):
        ExitRecord(tmp_path).write(status, final=final)
        assert {**read(tmp_path), "time": ""} == {"status": status, "outcome": outcome, "final": final, "time": ""}
        assert final_status(tmp_path) == (kept if final else None)


def test_the_first_record_of_a_job_counts_and_the_next_job_removes_it(tmp_path: Path) -> None:
    first = ExitRecord(tmp_path)
    first.write(EXIT_ERROR, LOST)
    first.write(EXIT_DONE)
    assert read(tmp_path)["outcome"] == "lost"
    ExitRecord(tmp_path)
    assert not (tmp_path / EXIT_FILE).exists()


def test_without_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ExitRecord(None).write(EXIT_DONE)
    assert list(tmp_path.iterdir()) == []


def test_launch_node_sh_has_a_record_of_each_rank_of_the_last_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    ExitRecord(None).write(EXIT_USAGE)
    assert json.loads((tmp_path / "3.json").read_text())["outcome"] == "error"
    ExitRecord(None)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_written_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = ExitRecord(tmp_path)
    (tmp_path / EXIT_FILE).mkdir()
    record.write(EXIT_DONE)
    assert f"WARNING: {tmp_path / EXIT_FILE}: cannot be written: " in capsys.readouterr().err


def test_a_record_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / EXIT_FILE).mkdir()
    with pytest.raises(BadInput, match=r"exit\.json: cannot be written"):
        ExitRecord(tmp_path)


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    (tmp_path / EXIT_FILE).write_text("{")
    assert final_status(tmp_path) is None
