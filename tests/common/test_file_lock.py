"""File lock: contention, waiting, release with the file, and file systems without locks."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from common import file_lock
from common.errors import BadInput
from common.file_lock import lock, open_locked


def test_a_second_holder_is_refused_until_the_first_closes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        lock(first, path, "taken")
        with pytest.raises(BadInput, match=r"^taken$"):
            lock(second, path, "taken")
        first.close()
        lock(second, path, "taken")


def test_a_waiting_holder_gets_the_lock_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "LOCK_POLL_SECONDS", 0.01)
    path = tmp_path / "lock"
    first = path.open("w")
    lock(first, path, "taken")
    with path.open("w") as second:
        threading.Timer(0.1, first.close).start()
        lock(second, path, "taken", wait_seconds=60)
        assert first.closed


def test_a_file_system_without_locks_costs_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    path = tmp_path / "lock\n"
    with path.open("w") as file:
        lock(file, path, "taken")
    name = str(path).replace("\n", "\\n")
    assert capsys.readouterr().out.startswith(f"NOTE: {name}: cannot be locked ([Errno {errno.ENOLCK}] No locks")


def test_a_pipe_or_device_in_the_place_of_a_lock_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/null"), os.mkdir):
        make(path)
        with pytest.raises(BadInput, match="cannot be written"):
            open_locked(path, "taken")
        path.rmdir() if path.is_dir() else path.unlink()
    with open_locked(path, "taken"), pytest.raises(BadInput, match=r"^taken$"):
        open_locked(path, "taken")
