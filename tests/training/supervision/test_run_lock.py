"""Run lock: one job at a time, and what a restarted group of ranks reads in the lock file."""

import os
from pathlib import Path

import pytest

from common.errors import BadInput
from training.supervision.run_lock import LOCK_FILE, RunLock, take_run_lock


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
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


def test_a_link_in_the_place_of_the_lock_is_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    take_run_lock(tmp_path).write_job()
    assert (tmp_path / "elsewhere").read_text() == "alone"


@pytest.mark.parametrize(
    ("restarts", "before", "wanted"),
    [
        (1, "night", (True, False)),
        (1, "night resumed", (True, True)),
        (0, "night resumed", (False, False)),  # the first group of a new job of the same name
        (1, "day resumed", (False, False)),
        (1, "", (False, False)),
    ],
)
def test_a_restarted_group_knows_its_job_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, before: str, wanted: tuple[bool, bool]
) -> None:
    (tmp_path / LOCK_FILE).write_text(before)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    lock = take_run_lock(tmp_path)
    assert (lock.restarted, lock.resumed) == wanted
    lock.write_job()
    assert (tmp_path / LOCK_FILE).read_text() == (before if lock.restarted else "night")
    lock.write_resumed()
    assert (tmp_path / LOCK_FILE).read_text() == "night resumed"


def test_without_a_file_nothing_is_written() -> None:
    lock = RunLock()
    lock.write_job()
    lock.write_resumed()
    assert (lock.restarted, lock.resumed) == (False, False)
