"""Run lock: only one job at a time holds it, and restarted ranks recognize their job in the lock file.

Exit record: it is written once, removed by the next job, and read by restarted ranks.
"""

import json
import os
import re
from pathlib import Path

import pytest

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, REASONS, BadInput, Reason
from common.launch import JOB_VARIABLE, job_identity, without_launcher
from tests.conftest import ROOT
from training.supervision import run_lock
from training.supervision.run_lock import (
    EXIT_FILE,
    LOCK_FILE,
    NODE_VARIABLE,
    ExitRecord,
    JobExit,
    RunLock,
    final_exit,
    is_locked,
    lock_is_held,
    read_exit,
    take_run_lock,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_one_job_at_a_time_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOCK_SECONDS", 0.1)
    first = take_run_lock(tmp_path)
    with pytest.raises(BadInput, match="another job is training this run; wait for it to end, or stop it"):
        take_run_lock(tmp_path)
    assert first.file is not None
    first.file.close()  # as if its process had ended
    take_run_lock(tmp_path)


def test_pipe_instead_of_a_lock_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(BadInput, match=r"\.lock: cannot be written: is a pipe, wanted a regular file"):
        take_run_lock(tmp_path)
    assert lock_is_held(tmp_path) is None and is_locked(tmp_path)  # reports do not wait for the pipe either


def test_link_instead_of_a_lock_is_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    take_run_lock(tmp_path).write_job(["a"])
    assert json.loads((tmp_path / "elsewhere").read_text())["torchruns"] == ["a"]


@pytest.mark.parametrize(
    ("restarts", "holder_changes", "expected"),  # expected: (restarted, resumed)
    [
        (1, {"resumed": False}, (True, False)),
        (1, {}, (True, True)),
        (1, {"nodes": 2}, (False, True)),  # torchrun has stopped the ranks because a node left
        (0, {}, (False, True)),  # a node has joined, which torchrun does not count as a restart
        (1, {"torchruns": ["d", "c"]}, (False, True)),  # rank 0 was on another node
        (0, {"torchruns": ["c"]}, (False, False)),  # the first group of a new job
        (1, {"torchruns": ["c"]}, (False, False)),  # the first group of a new job failed before its ranks had met
        (1, None, (False, False)),
    ],
)
def test_restarted_ranks_recognize_their_job(
    restarts: int,
    holder_changes: dict[str, object] | None,
    expected: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = {"nodes": 1, "torchruns": ["a", "b"], "resumed": True}
    content = "night resumed" if holder_changes is None else json.dumps(holder | holder_changes)
    (tmp_path / LOCK_FILE).write_text(content)
    monkeypatch.setattr(run_lock, "torchrun_identity", lambda: "b")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    lock = take_run_lock(tmp_path)
    restarted = lock.restarted
    lock.write_job({"b", "d"})
    assert (restarted, lock.resumed) == expected
    new_holder = {"nodes": 1, "torchruns": ["b", "d"], "resumed": expected[1]}
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == new_holder
    lock.write_resumed()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == new_holder | {"resumed": True}


def read(run: Path) -> dict[str, object]:
    return json.loads((run / EXIT_FILE).read_text())


@pytest.mark.parametrize(
    ("status", "outcome", "reason", "blocks_restart"),
    [
        (EXIT_DONE, "done", "finished", False),
        (EXIT_ERROR, "error", "disk-full", False),
        (EXIT_ERROR, "lost", "lost-rank", False),
        (EXIT_DIVERGED, "diverged", "non-finite", True),
        (EXIT_STOPPED, "stopped", "out-of-budget", True),
    ],
)
def test_only_final_stop_or_divergence_blocks_a_restart(
    tmp_path: Path, status: int, outcome: str, reason: Reason, *, blocks_restart: bool
) -> None:
    for damaged in ("{", ""):
        (tmp_path / EXIT_FILE).write_text(damaged)
        assert final_exit(tmp_path) is None
    for final in (False, True):
        ExitRecord(tmp_path).write(status, reason, "run\x1b: a problem\nand another", final=final)
        record = {"status": status, "outcome": outcome, "reason": reason, "final": final, "job": job_identity()}
        record |= {"problem": "run\\x1b: a problem\nand another"}
        assert {key: value for key, value in read(tmp_path).items() if key != "time"} == record
        assert final_exit(tmp_path) == (read_exit(tmp_path) if blocks_restart and final else None)


def test_first_exit_record_counts_until_the_next_job(tmp_path: Path) -> None:
    first = ExitRecord(tmp_path)
    first.write(EXIT_ERROR, "lost-rank")
    first.write(EXIT_DONE, "finished")
    assert read(tmp_path)["outcome"] == "lost"
    ExitRecord(tmp_path)
    assert not (tmp_path / EXIT_FILE).exists()


def test_a_users_exit_json_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / EXIT_FILE
    foreign = ['{"exits": ["north"]}', "my notes", "{", "[75]", '{"status": "shipped"}', '{"status": 0, "outcome": 1}']
    foreign += ['{"status": true, "outcome": "done"}', '{"status": 0}', '{"outcome": "done"}']
    for content in foreign:
        path.write_text(content)
        problem = rf"exit.json: is not the exit record of a job, .* \({len(content)} bytes\); move it away"
        with pytest.raises(BadInput, match=problem):
            ExitRecord(tmp_path)
        assert path.read_text() == content
    # The first record is from an early version, and the second one is empty.
    for record in ('{"status": 75, "outcome": "stopped", "time": "2026-11-20T10:00:00Z"}', ""):
        path.write_text(record)
        ExitRecord(tmp_path)
        assert not path.exists()


def test_exit_json_names_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ExitRecord(tmp_path).write(EXIT_STOPPED, "stopped")
    alone = read_exit(tmp_path)
    monkeypatch.setenv(JOB_VARIABLE, "night")
    ExitRecord(tmp_path).write(EXIT_STOPPED, "stopped")
    chosen = read_exit(tmp_path)
    assert alone is not None and chosen is not None and (alone.job, chosen.job) != (None, alone.job)
    assert chosen.job == "night" and JOB_VARIABLE not in without_launcher()


def test_exit_records_of_other_versions_are_read(tmp_path: Path) -> None:
    earlier = {"status": EXIT_STOPPED, "outcome": "stopped", "final": True, "time": "2026-11-20T10:00:00Z"}
    (tmp_path / EXIT_FILE).write_text(json.dumps(earlier))  # an earlier version did not name the job
    assert read_exit(tmp_path) == JobExit(EXIT_STOPPED, "stopped", True)
    (tmp_path / EXIT_FILE).write_text(json.dumps(earlier | {"job": "night"}))  # an earlier version gave no reason
    assert read_exit(tmp_path) == JobExit(EXIT_STOPPED, "stopped", True, "night")
    for reason in ("of a later version", 5, ["stopped"], None):
        (tmp_path / EXIT_FILE).write_text(json.dumps(earlier | {"reason": reason, "problem": "none"}))
        assert read_exit(tmp_path) == JobExit(EXIT_STOPPED, "stopped", True, None, None, "none")


def test_docs_explain_each_exit_reason() -> None:
    for page, heading in (("checkpoints.md", "## Restart loops"), ("troubleshooting.md", "## Exit statuses")):
        section = (ROOT / "docs" / page).read_text().partition(heading)[2].partition("\n## ")[0]
        assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == [*REASONS], page


def test_nothing_is_written_without_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock = RunLock()
    lock.write_job(["a"])
    lock.write_resumed()
    ExitRecord(None).write(EXIT_DONE, "finished")
    assert list(tmp_path.iterdir()) == [] and not lock.restarted


def test_node_script_gets_a_record_per_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    ExitRecord(None).write(EXIT_USAGE, "usage-error")
    assert json.loads((tmp_path / "3.json").read_text())["outcome"] == "error"
    ExitRecord(None)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_record_warns_but_unremovable_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ExitRecord(tmp_path)
    (tmp_path / EXIT_FILE).mkdir()
    record.write(EXIT_DONE, "finished")
    assert f"WARNING: {tmp_path / EXIT_FILE}: cannot be written: " in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"exit\.json: cannot be written"):
        ExitRecord(tmp_path)
