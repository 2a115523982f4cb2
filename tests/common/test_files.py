"""Files written all or nothing; locks, and file systems without; errors that say why a file cannot be written."""

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


def test_a_link_at_the_partial_name_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".partial-x").symlink_to(victim)
    replace_file(tmp_path / "x", "new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "x").read_text() == "new"


def test_writers_of_one_file_leave_it_whole_whoever_is_last_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".partial-x").write_text("left by a kill " * 100_000)
    contents = [letter * 50_000 for letter in "abcd"]

    def write(content: str) -> None:
        for _ in range(100):
            replace_file(tmp_path / "x", content)
            assert (tmp_path / "x").read_text() in contents

    with ThreadPoolExecutor() as threads:  # a lock keeps threads apart as it does processes
        list(threads.map(write, contents))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("name", ["", ".", "/", "..", "x"])
def test_a_name_that_is_a_folder_is_refused_as_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="a folder has this name"), writing(name):
        replace_file(Path(name), "new")


def test_the_advice_fits_the_reason() -> None:
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


def test_an_impossible_name_is_no_folder(tmp_path: Path) -> None:
    assert is_folder(tmp_path)
    assert not is_folder(tmp_path / ("x" * 5000))


def test_the_innermost_mount_is_found_and_of_several_there_the_last(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:40 / /my\\040runs rw - nfs4 server:/a rw\n"
        "24 22 0:41 / /my\\040runs rw master:2 shared:3 - fuse.gcsfuse bucket rw\n"
    )
    paths = ("/my runs", "/my runs/8xa100", "/my", "/my runs too")
    assert [mounted_as(Path(path), mounts) for path in paths] == [*["fuse.gcsfuse bucket"] * 2, *["ext4 /dev/sda1"] * 2]
    assert mounted_as(tmp_path, tmp_path / "nothing") == ""


def test_an_error_of_the_system_names_the_file_where_one_is_known() -> None:
    assert system_error(OSError(errno.EIO, "Input/output error", "a/b")) == "a/b: Input/output error"
    assert system_error(OSError("lost")) == "lost"


def test_a_hash_is_of_the_whole_file(tmp_path: Path) -> None:
    content = b"x" * (files.BLOCK_BYTES + 1)
    (tmp_path / "x").write_bytes(content)
    assert sha256(tmp_path / "x") == hashlib.sha256(content).hexdigest()


def test_a_waiting_holder_gets_the_lock_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_POLL_SECONDS", 0.01)
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
    assert capsys.readouterr().err.startswith(f"NOTE: {name}: cannot be locked ([Errno {errno.ENOLCK}] No locks")


def test_a_pipe_or_device_in_the_place_of_a_lock_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/null"), os.mkdir):
        make(path)
        with pytest.raises(BadInput, match="cannot be written"):
            open_locked(path, "taken")
        path.rmdir() if path.is_dir() else path.unlink()
    with open_locked(path, "taken"), pytest.raises(BadInput, match=r"^taken$"):
        open_locked(path, "taken")


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
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
        assert pickle.loads(pickle.dumps(full.value)).filename == str(tmp_path / name)  # from a worker


def test_a_partial_directory_has_one_writer_and_no_leftovers(tmp_path: Path) -> None:
    final = tmp_path / "out"
    (tmp_path / ".partial-out" / "left").mkdir(parents=True)  # by a process that was killed
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


def test_who_waits_for_a_partial_directory_gets_an_empty_one_of_its_own(tmp_path: Path) -> None:
    final, seen = tmp_path / "out", []

    def second() -> None:
        with partial_directory(final, "taken", wait_seconds=60) as partial:
            seen.append((final.exists(), [*partial.iterdir()]))

    with partial_directory(final, "taken") as partial:
        (partial / "a").touch()
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        publish_folder(partial, final)
    waiting.join()
    assert seen == [(True, [])]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "out"]


def test_a_folder_is_synced_whole_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, final, synced = tmp_path / ".partial-out", tmp_path / "out", []
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "file").write_text("content")
    (partial / "link").symlink_to("nowhere")  # has nothing to sync
    (partial / "above").symlink_to("..")  # and is not followed

    def record(path: Path) -> None:
        synced.append((str(path.relative_to(tmp_path)) if path.is_relative_to(tmp_path) else "outside", final.exists()))

    monkeypatch.setattr(files, "sync", record)
    publish_folder(partial, final)
    before = [(".partial-out/inner/file", False), (".partial-out/inner", False), (".partial-out", False)]
    assert synced == [*before, (".", True), ("outside", True)]


def test_a_folder_replaces_another_only_by_its_name_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, final, aside = (tmp_path / name for name in (".partial-out", "out", ".partial-out-aside"))
    for folder in (partial, final):
        folder.mkdir()
        (folder / folder.name).touch()
    with pytest.raises(OSError, match="not empty"):
        publish_folder(partial, final)
    for problem, replaced in ((errno.EIO, False), (errno.EINVAL, True)):  # the latter: a folder that cannot be synced

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


def test_only_our_own_files_are_replaced(tmp_path: Path) -> None:
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
