"""Atomic writes, locks (with a note if the file system has none), and errors that explain failed writes."""

import errno
import fcntl
import hashlib
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from common import files
from common.errors import BadInput
from common.files import (
    Locked,
    check_replaceable,
    is_folder,
    lock,
    mounted_as,
    open_locked,
    partial_directory,
    publish_folder,
    replace_file,
    sha256,
    system_error,
    writing,
)
from common.json_files import JsonLog
from tokens.format.header import write_weighted
from tokens.format.manifest import Content
from tokens.prepare.commit_log import CommitLog, Uploaded
from training.checkpoints.atomic_commit import create_partial


def test_links_at_the_partial_name_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".partial-x").symlink_to(victim)
    replace_file(tmp_path / "x", "new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "x").read_text() == "new"


def test_concurrent_writers_leave_one_complete_file(tmp_path: Path) -> None:
    (tmp_path / ".partial-x").write_text("left by a kill " * 100_000)
    contents = [letter * 50_000 for letter in "abcd"]

    def write(content: str) -> None:
        for _ in range(100):
            replace_file(tmp_path / "x", content)
            assert (tmp_path / "x").read_text() in contents

    with ThreadPoolExecutor() as threads:  # the lock works between threads as it does between processes
        list(threads.map(write, contents))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("name", ["", ".", "/", "..", "x"])
def test_folders_cannot_be_replaced_by_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="a folder has this name"), writing(name):
        replace_file(Path(name), "new")


def test_advice_matches_the_system_error() -> None:
    for number, advice in ((errno.ENOSPC, "make room"), (errno.EACCES, "permissions"), (errno.EROFS, "read-only")):
        with pytest.raises(BadInput, match=advice), writing("x"):
            raise OSError(number, "no")


def test_a_failed_replacement_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "x", b"old\r\n\xff")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "x", "new", durable=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old\r\n\xff"}


def test_an_impossible_name_is_not_a_folder(tmp_path: Path) -> None:
    assert is_folder(tmp_path)
    assert not is_folder(tmp_path / ("x" * 5000))


def test_the_innermost_and_last_mount_is_found(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:40 / /my\\040runs rw - nfs4 server:/a rw\n"
        "24 22 0:41 / /my\\040runs rw master:2 shared:3 - fuse.gcsfuse bucket rw\n"
    )
    paths = ("/my runs", "/my runs/8xa100", "/my", "/my runs too")
    assert [mounted_as(Path(path), mounts) for path in paths] == [*["fuse.gcsfuse bucket"] * 2, *["ext4 /dev/sda1"] * 2]
    assert mounted_as(tmp_path, tmp_path / "nothing") == ""


def test_system_errors_name_the_file_if_known() -> None:
    assert system_error(OSError(errno.EIO, "Input/output error", "a/b")) == "a/b: Input/output error"
    assert system_error(OSError("lost")) == "lost"


def test_hashes_cover_the_complete_file(tmp_path: Path) -> None:
    content = b"x" * (files.BLOCK_BYTES + 1)
    (tmp_path / "x").write_bytes(content)
    assert sha256(tmp_path / "x") == hashlib.sha256(content).hexdigest()


def test_a_waiting_process_gets_the_released_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_POLL_SECONDS", 0.01)
    path = tmp_path / "lock"
    first = path.open("w")
    lock(first, path, "taken")
    with path.open("w") as second:
        threading.Timer(0.1, first.close).start()
        lock(second, path, "taken", wait_seconds=60)
        assert first.closed


def test_missing_file_locks_cause_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    path = tmp_path / "lock\n"
    with path.open("w") as file:
        lock(file, path, "taken")
    name = str(path).replace("\n", "\\n")
    assert capsys.readouterr().err.startswith(f"NOTE: {name}: cannot be locked ([Errno {errno.ENOLCK}] No locks")


def test_lock_files_must_be_regular_files(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/null"), os.mkdir):
        make(path)
        with pytest.raises(BadInput, match="cannot be written"):
            open_locked(path, "taken")
        path.rmdir() if path.is_dir() else path.unlink()
    with open_locked(path, "taken"), pytest.raises(BadInput, match=r"^taken$"):
        open_locked(path, "taken")


def test_full_disk_errors_name_the_file(tmp_path: Path) -> None:
    log, lines = CommitLog(tmp_path, "x"), JsonLog(tmp_path / "lines")
    entry = Uploaded("a" * 9000, Content(size_bytes=1, sha256="", max_id=0))
    writers: dict[str, Callable[[], object]] = {
        "replaced": lambda: replace_file(tmp_path / "replaced", bytes(9000)),
        "lines": lambda: lines.append({"a": "x" * 9000}),
        "ledger.jsonl": lambda: log.append(entry),
        "weights": lambda: write_weighted(tmp_path / "weights", np.zeros(9000, "<u2"), np.zeros(9000, "u1"), 9),
        ".partial-step/a": lambda: create_partial(tmp_path / "step", {"a": 9000}),
    }
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as full:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert full.value.filename == str(tmp_path / name)
        assert pickle.loads(pickle.dumps(full.value)).filename == str(tmp_path / name)  # as if from a worker process


def test_a_partial_directory_has_one_writer_and_no_leftovers(tmp_path: Path) -> None:
    final = tmp_path / "out"
    (tmp_path / ".partial-out" / "left").mkdir(parents=True)  # as if left by a killed process
    with partial_directory(final, "taken") as partial:
        assert not [*partial.iterdir()]
        with pytest.raises(Locked, match="taken"), partial_directory(final, "taken"):
            pass
        (partial / "a").touch()
        publish_folder(partial, final)
    for error in (ValueError("fails"), FileNotFoundError("fails")):
        with pytest.raises(type(error), match="fails"), partial_directory(final, "taken") as partial:
            (partial / "b").touch()
            raise error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "out"]


def test_a_waiting_writer_gets_an_empty_directory(tmp_path: Path) -> None:
    final, observations = tmp_path / "out", []

    def second() -> None:
        with partial_directory(final, "taken", wait_seconds=60) as partial:
            observations.append((final.exists(), [*partial.iterdir()]))

    with partial_directory(final, "taken") as partial:
        (partial / "a").touch()
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        publish_folder(partial, final)
    waiting.join()
    assert observations == [(True, [])]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "out"]


def test_folders_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, final, synced = tmp_path / ".partial-out", tmp_path / "out", []
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "file").write_text("content")
    (partial / "link").symlink_to("nowhere")  # leads to nothing that could be synced
    (partial / "above").symlink_to("..")  # links are not followed

    def record(path: Path) -> None:
        synced.append((str(path.relative_to(tmp_path)) if path.is_relative_to(tmp_path) else "outside", final.exists()))

    monkeypatch.setattr(files, "sync", record)
    publish_folder(partial, final)
    before = [(".partial-out/inner/file", False), (".partial-out/inner", False), (".partial-out", False)]
    assert synced == [*before, (".", True), ("outside", True)]


def test_a_folder_is_replaced_only_with_an_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, final, aside = (tmp_path / name for name in (".partial-out", "out", ".partial-out-aside"))
    for folder in (partial, final):
        folder.mkdir()
        (folder / folder.name).touch()
    with pytest.raises(OSError, match="not empty"):
        publish_folder(partial, final)
    # EINVAL means that the file system cannot sync folders.
    for problem, replaced in ((errno.EIO, False), (errno.EINVAL, True)):

        def broken(synced: Path, problem: int = problem) -> None:
            if synced == tmp_path:
                raise OSError(problem, os.strerror(problem))

        monkeypatch.setattr(files, "sync", broken)
        with suppress(OSError) if replaced else pytest.raises(OSError, match="Input/output error"):
            publish_folder(partial, final, aside=aside)
        names = {path: [inner.name for inner in path.iterdir()] for path in tmp_path.iterdir()}
        assert names == (
            {final: [partial.name], aside: ["out"]} if replaced else {final: ["out"], partial: [partial.name]}
        )


def test_only_our_files_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result"
    assert check_replaceable(path, b"sign", "a result", "--output") is None
    path.write_bytes(b"with a sign in it")
    assert check_replaceable(path, b"sign", "a result", "--output") == 17
    path.write_bytes(b"a user's")
    advice = rf"{path}: is not a result, so it was not overwritten \(8 bytes\); "
    with pytest.raises(BadInput, match=advice + "pass another --output"):
        check_replaceable(path, b"sign", "a result", "--output")
    with pytest.raises(BadInput, match=advice + "move it away"):
        check_replaceable(path, lambda content: content == b"ours", "a result")
