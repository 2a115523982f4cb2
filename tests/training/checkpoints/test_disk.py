"""Checkpoints on a disk: interrupted operations are undone, other people's files are left alone."""

import errno
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from training.checkpoints import disk
from training.checkpoints.disk import Disk, new_archive
from training.checkpoints.storage import MANIFEST, NewFile


def test_a_checkpoint_whose_name_cannot_be_synced_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new = tmp_path / "step-00000002", tmp_path / ".partial-step-00000002"
    for directory, text in ((path, "old"), (new, "new")):
        directory.mkdir()
        (directory / "state.json").write_text(text)

    storage = Disk(tmp_path)

    def broken(_: Path) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(disk, "sync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        storage.publish(path.name)
    storage.discard(path.name)
    assert [(file, file.read_text()) for file in tmp_path.rglob("*.json")] == [(path / "state.json", "old")]


def test_hidden_names_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (".partial-step-00000004", ".partial-mine", ".partial-step-00000004-aside", "step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-best").symlink_to("nowhere")
    Disk(tmp_path).remove([])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-mine", "step-00000004"]


def test_rows_of_all_ranks_fill_a_file(tmp_path: Path) -> None:
    storage = Disk(tmp_path / "checkpoints")
    storage.begin("step-00000001", {"model.safetensors": NewFile(b"header", 10)})
    for offset_bytes, content in ((8, b"cd"), (6, b"ab")):
        storage.write_rows("step-00000001", "model.safetensors", [(offset_bytes, memoryview(content))])
    entry = storage.entry("step-00000001", "model.safetensors")
    assert storage.names() == [] and entry.size_bytes == 10
    storage.publish("step-00000001")
    assert storage.names() == ["step-00000001"]
    assert storage.local_file("step-00000001", "model.safetensors").read_bytes() == b"headerabcd"


def test_a_link_is_told_by_the_name_that_it_refers_to(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    storage = Disk(tmp_path)
    storage.point("latest", "step-00000001")
    (tmp_path / "kept").symlink_to(tmp_path / "step-00000001")
    (tmp_path / "elsewhere").symlink_to("/somewhere/else")
    targets = [storage.target(name) for name in ("latest", "kept", "elsewhere", "step-00000001", "nothing")]
    assert targets == ["step-00000001", "step-00000001", "/somewhere/else", None, None]
    storage.point("latest", None)
    assert not storage.exists("latest")


def test_a_replaced_checkpoint_comes_back_unless_its_replacement_is_complete(tmp_path: Path) -> None:
    for name in (".partial-step-00000002-aside", ".partial-step-00000004-aside", "step-00000004"):
        (tmp_path / name).mkdir()
    Disk(tmp_path).recover()
    assert Disk(tmp_path).names() == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("place", "function"),
    [(disk, "sync"), (disk.shutil, "copy2"), (disk, "_remove")],
    ids=["copying", "manifest", "end"],
)
def test_a_kill_while_a_folder_of_an_image_is_replaced_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: ModuleType, function: str
) -> None:
    path, own = tmp_path / "step-00000001", {"state.json": "old", MANIFEST: "old"}
    for folder, content in ((path, "old"), (tmp_path / ".partial-step-00000001", "new")):
        folder.mkdir()
        for file in own:
            (folder / file).write_text(content)

    def refuse(*_: Path) -> None:
        raise OSError(errno.EXDEV, "as overlayfs does")

    def killed(*_: object) -> None:
        if function == "_remove":
            (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", refuse)
        patched.setattr(place, function, killed)
        Disk(tmp_path).publish(path.name)
    Disk(tmp_path).recover()
    assert {file.name: file.read_text() for file in path.iterdir()} == own


def test_folders_of_a_containers_image_are_set_aside_renamed_and_removed(tmp_path: Path) -> None:
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
        storage = Disk(run / "checkpoints")
        archived = storage.set_aside(new_archive(run), ["step-00000001"])
        storage.remove(["step-00000002"])
        storage.rename("step-00000003", "kept")
        assert (archived / "step-00000001" / MANIFEST).read_text() == "step-00000001"
        assert storage.names() == ["kept"] and storage.left_behind() == []
    finally:
        subprocess.run(["umount", run], check=True)
