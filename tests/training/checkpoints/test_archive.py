"""Archive: a copied run is resumed, and nothing that it holds is deleted."""

import os
import shutil
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import train
from training.checkpoints.archive import archive_after, archive_all, restore
from training.checkpoints.directory import find
from training.checkpoints.disk import checkpoints_of, on_disk
from training.checkpoints.storage import Checkpoint
from training.checkpoints.verification import verify


@pytest.mark.parametrize("left", ["latest", "best", "both", "all"])
def test_a_copy_that_followed_links_is_resumed_and_loses_nothing(copied: Path, left: str) -> None:
    directory = copied / "checkpoints"
    for link in ("latest", "best"):
        target = (directory / link).resolve()
        (directory / link).unlink()
        if left in (link, "both", "all"):
            shutil.copytree(target, directory / link)
    if left != "all":
        for name in ("step-00000004", "step-00000008"):
            shutil.rmtree(directory / name)
    digests = {(path / "manifest.json").read_text() for path in directory.iterdir()}
    lines = restore(copied)
    assert len(lines) == (1 if left in ("latest", "best") else 2)
    assert all("is no link, as after a copy that followed links; it is now " in line for line in lines)
    found = find(checkpoints_of(copied), "auto")
    assert found is not None and found.name == "step-00000008"  # the best one as well
    links = ("latest", "best") if left in ("both", "all") else (left,)
    assert all((directory / link).is_symlink() and verify(on_disk(directory / link)) is None for link in links)
    left_over = {path.read_text() for path in copied.rglob("manifest.json")}
    assert left_over == digests
    assert restore(copied) == []


def test_a_run_copied_with_nothing_but_a_folder_latest_goes_on(copied: Path) -> None:
    directory = copied / "checkpoints"
    for name in ("latest", "best"):
        (directory / name).unlink()
    (directory / "step-00000008").rename(directory / "latest")
    shutil.rmtree(directory / "step-00000004")
    done = train(copied, "--set", "min_train_tokens=2304", "--set", "schedule_learning_rate=false")
    assert done.returncode == 0, done.stderr
    assert f"NOTE: {directory / 'latest'} is no link" in done.stdout
    assert f"resuming from {directory / 'step-00000008'} at step 8 of 9" in done.stdout
    assert (directory / "latest").readlink() == Path("step-00000009")


def test_a_damaged_folder_in_a_links_place_is_refused_and_never_deleted(copied: Path) -> None:
    directory = copied / "checkpoints"
    (directory / "latest").unlink()
    (directory / "best").unlink()
    (directory / "step-00000008").rename(directory / "latest")
    (directory / "latest" / "state.json").write_text("{}")
    shutil.rmtree(directory / "step-00000004")
    assert restore(copied) == []
    with pytest.raises(BadInput, match=r"latest/state\.json: got 2 bytes.*start anew with --resume never"):
        find(checkpoints_of(copied), "auto")
    (directory / "note").mkdir()
    checkpoints_of(copied).point("latest", "note")
    assert [path.read_text() for path in copied.glob("archive/*/checkpoints/latest/state.json")] == ["{}"]


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "checkpoints")
    with pytest.raises(BadInput, match="checkpoints: cannot be written: Permission denied; check the permissions"):
        restore(copied)


def test_later_checkpoints_are_archived_and_the_links_follow(copied: Path) -> None:
    storage = checkpoints_of(copied)
    archived = archive_after(copied, Checkpoint(storage, "step-00000004"))
    assert archived is not None and archived.relative_to(copied).parts[::2] == ("archive", "checkpoints")
    assert [path.name for path in archived.iterdir()] == ["step-00000008"]
    assert (storage.target("latest"), storage.target("best")) == ("step-00000004", "step-00000004")
    assert archive_after(copied, Checkpoint(storage, "step-00000004")) is None


def test_a_kept_copy_gets_the_name_of_its_step(copied: Path) -> None:
    storage = checkpoints_of(copied)
    storage.rename("step-00000004", "kept")
    assert archive_after(copied, Checkpoint(storage, "kept")) is not None
    assert storage.names() == ["best", "kept", "latest", "step-00000004"]
    assert verify(Checkpoint(storage, "step-00000004")) is None


def test_a_start_from_step_0_archives_all_results(copied: Path) -> None:
    before = {path.name for path in copied.iterdir()}
    archived = archive_all(copied)
    assert archived is not None
    kept = {"exit.json", "model.json", "train.json", ".lock"} & before
    assert {path.name for path in copied.iterdir()} == kept | {"archive"}
    assert {path.name for path in archived.iterdir()} == before - kept
    assert archive_all(copied) is None
