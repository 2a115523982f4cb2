"""Archive: a copied run can be resumed, and nothing in it is deleted."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import complete, train
from tests.training.checkpoints.conftest import flipped
from training.checkpoints.archive import archive_after, archive_all, describe
from training.checkpoints.atomic_commit import recover
from training.checkpoints.directory import checkpoints_of, link_target, names_in
from training.checkpoints.lookup import find_to_resume
from training.checkpoints.saved_state import verify


def test_folders_instead_of_links_are_archived(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy that follows links, as `cp -rL` and `zip` do, has folders in place of the links."""
    directory = copied / "checkpoints"
    (directory / "latest").unlink()
    shutil.copytree(directory / "step-00000008", directory / "latest")
    checkpoint = find_to_resume(directory, "auto")
    assert checkpoint == directory / "step-00000008"
    assert archive_after(checkpoint) is None
    [moved] = copied.glob("archive/*/checkpoints/latest")
    assert verify(moved) is None and verify(directory / "latest") is None and (directory / "latest").is_symlink()
    assert f"{directory / 'latest'} is not a symbolic link; moved to {moved}" in capsys.readouterr().err


@pytest.mark.parametrize("folders", ["latest", "best", "both", "all"])
def test_copy_with_folders_for_links_loses_nothing(copied: Path, folders: str) -> None:
    directory = copied / "checkpoints"
    (directory / "best").unlink()
    (directory / "best").symlink_to("step-00000004")
    for link in ("latest", "best"):
        target = (directory / link).resolve()
        (directory / link).unlink()
        if folders in (link, "both", "all"):
            shutil.copytree(target, directory / link)
    if folders != "all":
        for name in ("step-00000004", "step-00000008"):
            shutil.rmtree(directory / name)
    digests = {path.read_text() for path in directory.rglob("manifest.json")}
    checkpoint = find_to_resume(directory, "auto")
    assert checkpoint is not None
    archive_after(checkpoint)
    newest = "step-00000004" if folders == "best" else "step-00000008"
    assert (directory / "latest").readlink() == Path(newest) and verify(directory / "latest") is None
    names = {path.name for path in directory.iterdir() if not path.is_symlink()}
    assert names == ({newest} if folders in ("latest", "best") else {"step-00000004", "step-00000008"})
    assert {path.read_text() for path in copied.rglob("manifest.json")} == digests
    assert find_to_resume(directory, "auto") == directory / newest and archive_after(directory / newest) is None


def test_run_copied_with_only_latest_continues(copied: Path) -> None:
    directory = copied / "checkpoints"
    for name in ("latest", "best"):
        (directory / name).unlink()
    (directory / "step-00000008").rename(directory / "latest")
    shutil.rmtree(directory / "step-00000004")
    done = complete(copied, "--set", "min_train_tokens=2304", "--set", "schedule_learning_rate=false", ranks=2)
    assert f"resuming from {directory / 'latest'} at step 8 of 9" in done.stdout
    assert (directory / "latest").readlink() == Path("step-00000009")
    assert (directory / "step-00000008").is_dir() and not (copied / "archive").exists()


def test_unwritable_checkpoint_directory_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "checkpoints")
    with pytest.raises(BadInput, match="checkpoints: cannot be written: Permission denied; check the permissions"):
        recover(checkpoints_of(copied))


def test_later_checkpoints_are_archived_and_links_updated(copied: Path) -> None:
    directory = checkpoints_of(copied)
    archived = archive_after(directory / "step-00000004")
    assert archived is not None and archived.relative_to(copied).parts[::2] == ("archive", "checkpoints")
    assert [path.name for path in archived.iterdir()] == ["step-00000008"]
    assert (link_target(directory / "latest"), link_target(directory / "best")) == ("step-00000004", "step-00000004")
    assert archive_after(directory / "step-00000004") is None


def test_resumed_copy_gets_the_name_of_its_step(copied: Path) -> None:
    directory = checkpoints_of(copied)
    (directory / "step-00000004").rename(directory / "kept")
    assert archive_after(directory / "kept") is not None
    assert names_in(directory) == ["best", "kept", "latest", "step-00000004"]
    assert verify(directory / "step-00000004") is None


def test_start_from_step_0_archives_all_results(copied: Path) -> None:
    before = {path.name for path in copied.iterdir()}
    archived = archive_all(copied)
    assert archived is not None
    remaining = {"exit.json", "model.json", "train.json", ".lock"} & before
    assert {path.name for path in copied.iterdir()} == remaining | {"archive"}
    assert {path.name for path in archived.iterdir()} == before - remaining
    assert archive_all(copied) is None


def test_archived_checkpoints_stay_on_their_file_system(copied: Path, move_elsewhere: Callable[[Path], Path]) -> None:
    directory = copied / "checkpoints"
    new_folder = move_elsewhere(directory)
    (directory / "lost+found").mkdir()
    was_link, before = directory.is_symlink(), {path.read_text() for path in new_folder.rglob("manifest.json")}
    later = archive_after(directory / "step-00000004")
    assert later is not None and later.parent == directory / ".archive"
    assert [path.name for path in later.iterdir()] == ["step-00000008"]
    assert names_in(directory) == ["best", "latest", "step-00000004"]
    archived = archive_all(copied)
    assert archived is not None and (archived / "metrics.jsonl").is_file()
    assert (archived / "checkpoints").resolve() == (directory / ".archive" / archived.name).resolve()
    assert str((archived / "checkpoints").resolve()) in describe(archived)
    assert verify(archived / "checkpoints" / "latest") is None
    assert {path.read_text() for path in new_folder.rglob("manifest.json")} == before
    assert names_in(directory) == [] and directory.is_symlink() == was_link
    assert {path.name for path in directory.iterdir()} == {".archive", "lost+found"}
    assert archive_all(copied) is None


def test_run_continues_with_checkpoints_on_another_file_system(
    copied: Path, move_elsewhere: Callable[[Path], Path]
) -> None:
    directory = copied / "checkpoints"
    new_folder = move_elsewhere(directory)
    newest = new_folder / "step-00000008" / "model.safetensors"
    newest.write_bytes(flipped(newest.read_bytes(), -1000, 0))
    jobs = [train(copied, *options) for options in ((), ("--resume", "step-00000004"), ("--resume", "never"))]
    assert [job.returncode for job in jobs] == [0, 0, 0], [job.stderr for job in jobs]
    archives = [directory / ".archive" / path.name for path in sorted((copied / "archive").iterdir())]
    assert len(archives) == 3
    for archive, job in zip(archives, jobs, strict=True):
        assert str(archive) in job.stdout or str(archive.resolve()) in job.stdout
    archived_names = [sorted(path.name for path in archive.iterdir()) for archive in archives]
    steps = ["step-00000004", "step-00000008"]
    assert archived_names == [["step-00000008"], ["step-00000008"], ["best", "latest", *steps]]
    assert sorted(path.name for path in directory.iterdir()) == [".archive", "best", "latest", *steps]


def test_results_are_archived_across_file_systems(copied: Path, move_elsewhere: Callable[[Path], Path]) -> None:
    (copied / "archive").mkdir()
    move_elsewhere(copied / "archive")
    metrics, link_target_file = copied / "metrics.jsonl", copied.parent / "elsewhere.jsonl"
    metrics.rename(link_target_file)
    metrics.symlink_to("../elsewhere.jsonl")
    (copied / "answers").mkdir()
    (copied / "answers" / "one.json").write_text("{}")
    archived = archive_all(copied)
    assert archived is not None
    assert (archived / "metrics.jsonl").read_text() == link_target_file.read_text()
    assert (archived / "answers" / "one.json").read_text() == "{}" and not (copied / "answers").exists()
    assert verify(archived / "checkpoints" / "latest") is None
    assert (copied / "checkpoints" / ".archive" / archived.name / "latest").is_symlink()
