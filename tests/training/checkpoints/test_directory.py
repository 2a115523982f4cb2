"""Checkpoint directory: interrupted operations are undone, and other programs' files are left alone."""

import errno
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from common import files
from common.errors import BadInput
from common.files import partial_of, remove
from training.checkpoints import directory
from training.checkpoints.atomic_commit import publish, recover
from training.checkpoints.directory import (
    MANIFEST,
    archive,
    check_resume_name,
    link_target,
    names_in,
    point,
    rename,
    stale_partials,
)
from training.checkpoints.retention import discard, prune_disk


def test_checkpoint_that_cannot_be_synced_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-00000002"
    for folder, text in ((path, "old"), (partial_of(path), "new")):
        folder.mkdir()
        (folder / "state.json").write_text(text)

    def broken(synced: Path) -> None:
        if synced == tmp_path:
            raise OSError("Input/output error")

    monkeypatch.setattr(files, "sync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        publish(path)
    discard(path)
    assert [(file, file.read_text()) for file in tmp_path.rglob("*.json")] == [(path / "state.json", "old")]


def test_link_target_is_a_name_or_path(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    point(tmp_path / "latest", "step-00000001")
    (tmp_path / "kept").symlink_to(tmp_path / "step-00000001")
    (tmp_path / "elsewhere").symlink_to("/somewhere/else")
    targets = [link_target(tmp_path / name) for name in ("latest", "kept", "elsewhere", "step-00000001", "nothing")]
    assert targets == ["step-00000001", "step-00000001", "/somewhere/else", None, None]
    point(tmp_path / "latest", None)
    assert not (tmp_path / "latest").exists()


def test_replaced_checkpoint_is_restored_after_a_kill(tmp_path: Path) -> None:
    for name in (".partial-step-00000002-aside", ".partial-step-00000004-aside", "step-00000004"):
        (tmp_path / name).mkdir()
    recover(tmp_path)
    assert names_in(tmp_path) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("module", "function"),
    [(directory, "sync"), (directory.shutil, "copy2"), (directory, "remove")],
    ids=["copying", "manifest", "end"],
)
def test_kill_while_replacing_an_image_folder_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
) -> None:
    path, old_files = tmp_path / "step-00000001", {"state.json": "old", MANIFEST: "old"}
    for folder, content in ((path, "old"), (partial_of(path), "new")):
        folder.mkdir()
        for file in old_files:
            (folder / file).write_text(content)

    def refuse(*_: Path) -> None:
        raise OSError(errno.EXDEV, "like overlayfs")

    def interrupt(*_: object) -> None:
        if function == "remove":
            (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", refuse)
        patched.setattr(module, function, interrupt)
        publish(path)
    recover(tmp_path)
    assert {file.name: file.read_text() for file in path.iterdir()} == old_files


def test_folders_of_a_container_image_can_be_moved(tmp_path: Path) -> None:
    image, changes, work, run = (tmp_path / name for name in ("image", "changes", "work", "run"))
    for name in ("step-00000001", "step-00000002", "step-00000003"):
        (image / "checkpoints" / name).mkdir(parents=True)
        (image / "checkpoints" / name / MANIFEST).write_text(name)
    for folder in (changes, work, run):
        folder.mkdir()
    layers = f"lowerdir={image},upperdir={changes},workdir={work}"
    if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, run], check=False).returncode:
        pytest.skip("needs the right to mount an overlay")
    try:
        folder = run / "checkpoints"
        archived = archive(folder, ["step-00000001"])
        prune_disk(folder, 3, None, keep=1)
        rename(folder / "step-00000003", folder / "kept")
        remove(folder / "latest")
        assert (archived / "step-00000001" / MANIFEST).read_text() == "step-00000001"
        assert names_in(folder) == ["kept"] and stale_partials(folder) == []
    finally:
        subprocess.run(["umount", run], check=True)


def test_resume_name_is_checked_before_a_download(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    for name in ("auto", "never", "step-00000004"):
        check_resume_name(tmp_path, name, is_here=True)
    check_resume_name(tmp_path, "elsewhere", is_here=False)  # the checkpoint may be on another node or in a bucket
    with pytest.raises(BadInput, match=r"latest: wanted the name of .*, not a path; pass --resume latest"):
        check_resume_name(tmp_path, f"{tmp_path}/checkpoints/latest", is_here=False)
    with pytest.raises(BadInput, match=r"nver: no such checkpoint; did you mean --resume never\? existing ones: "):
        check_resume_name(tmp_path, "nver", is_here=True)
    with pytest.raises(BadInput, match=r"xyz: no such checkpoint; existing ones: step-00000004"):
        check_resume_name(tmp_path, "xyz", is_here=True)
