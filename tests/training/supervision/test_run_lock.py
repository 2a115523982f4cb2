"""Run lock: one job at a time, and what a restarted group of ranks reads in the lock file."""

import json
import os
from pathlib import Path

import pytest

from common.errors import BadInput
from training.supervision import run_lock
from training.supervision.run_lock import LOCK_FILE, RunLock, is_locked, lock_is_held, take_run_lock


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_one_job_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    first = take_run_lock(tmp_path)
    with pytest.raises(BadInput, match="another job trains this run; wait for it, or stop it"):
        take_run_lock(tmp_path, wait_seconds=0.1)
    assert first.file is not None
    first.file.close()  # as when its process ends
    take_run_lock(tmp_path, wait_seconds=0)


def test_a_pipe_in_the_place_of_the_lock_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(BadInput, match=r"\.lock: cannot be written: is a pipe, wanted a regular file"):
        take_run_lock(tmp_path)
    assert lock_is_held(tmp_path) is None and is_locked(tmp_path)  # by reports: not waited for either


def test_a_link_in_the_place_of_the_lock_is_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    take_run_lock(tmp_path).write_job(["a"])
    assert json.loads((tmp_path / "elsewhere").read_text())["torchruns"] == ["a"]


@pytest.mark.parametrize(
    ("restarts", "before", "known"),
    [
        (1, {"resumed": False}, (True, False)),
        (1, {}, (True, True)),
        (1, {"nodes": 2}, (False, True)),  # after a stop by which torchrun let a node go
        (0, {}, (False, True)),  # a node has come: torchrun does not count that
        (1, {"torchruns": ["d", "c"]}, (False, True)),  # rank 0 was on another node
        (0, {"torchruns": ["c"]}, (False, False)),  # the first group of a new job
        (1, {"torchruns": ["c"]}, (False, False)),  # which failed before its ranks had met
        (1, None, (False, False)),
    ],
)
def test_a_later_group_of_a_job_knows_it_by_its_torchruns(
    restarts: int,
    before: dict[str, object] | None,
    known: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = {"nodes": 1, "torchruns": ["a", "b"], "resumed": True}
    (tmp_path / LOCK_FILE).write_text("night resumed" if before is None else json.dumps(holder | before))
    monkeypatch.setattr(run_lock, "torchrun_identity", lambda: "b")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    lock = take_run_lock(tmp_path)
    restarted = lock.restarted
    lock.write_job({"b", "d"})
    assert (restarted, lock.resumed) == known
    written = {"nodes": 1, "torchruns": ["b", "d"], "resumed": known[1]}
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == written
    lock.write_resumed()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == written | {"resumed": True}


def test_without_a_file_nothing_is_written() -> None:
    lock = RunLock()
    lock.write_job(["a"])
    lock.write_resumed()
    assert not lock.restarted
