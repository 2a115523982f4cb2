"""Models are found in runs even if links were lost. A folder that hides a model on the hub causes a note."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCardData

from common.errors import BadInput
from common.hub_client import OUR_TAG, note_local
from evaluation.shared.model_location import home_of, locate
from training.checkpoints.saved_state import read_state


def test_missing_best_checkpoint_is_an_error(copied: Path) -> None:
    directory = copied / "checkpoints"
    state = json.loads((directory / "latest" / "state.json").read_text())
    assert state["best_step"] == state["step"] == 8
    (directory / "latest").unlink()
    # Pretend that the run stopped at step 4 and that the best checkpoint is elsewhere.
    (directory / "latest").symlink_to("step-00000004")
    shutil.rmtree(directory / "step-00000008")
    absent = f"{directory}/best: the best checkpoint, step-00000008, is not on this disk; .* another one: .*/latest"
    with pytest.raises(BadInput, match=absent):
        locate(str(copied), None)
    assert locate(str(directory / "latest"), None).path.name == "step-00000004"
    (directory / "best").unlink()  # without links, the newest state names the best checkpoint
    assert locate(str(copied), None).path.name == "step-00000004"
    shutil.copytree(directory / "step-00000004", directory / "kept")
    shutil.rmtree(directory / "step-00000004")
    (directory / "latest").unlink()
    (directory / "latest").symlink_to("kept")
    with pytest.raises(BadInput, match="the best checkpoint, step-00000004, is not on this disk"):
        locate(str(copied), None)


def test_linked_checkpoints_folder_belongs_to_its_run(copied: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk" / "checkpoints"
    shutil.move(copied / "checkpoints", target)
    (copied / "checkpoints").symlink_to(target)
    location = locate(str(copied / "checkpoints" / "latest"), None)
    assert (location.run, location.home, location.path) == (copied, copied, copied / "checkpoints" / "step-00000008")
    assert home_of(str(copied / "checkpoints" / "latest")) == copied


@pytest.mark.parametrize("kind", ["folders", "files", "none"])
def test_links_of_a_copied_run_are_understood(copied: Path, kind: str) -> None:
    directory = copied / "checkpoints"
    for link in ("latest", "best"):
        target = (directory / link).resolve()
        (directory / link).unlink()
        if kind == "folders":
            shutil.copytree(target, directory / link)
        elif kind == "files":
            (directory / link).write_text(f"{target.name}\n")
    if kind == "folders":
        for step in directory.glob("step-*"):
            shutil.rmtree(step)
    for name in (None, "latest", "best"):
        assert read_state(locate(str(copied), name).path).position.step == 8


def test_folder_that_hides_a_hub_model_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note_local.cache_clear()
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "owner/run/checkpoints/step-1"):
        Path(name).mkdir(parents=True)
    assert home_of("owner/model") == Path("owner/model")
    assert "owner/model: using the local path of this name; for a model on the hub, write hf:owner/model" in (
        capsys.readouterr().err
    )
    assert home_of("hf:owner/model") == Path("runs/owner--model")
    home_of("owner/run")  # a local run is never mistaken for a model on the hub
    note_local.cache_clear()
    data = ModelCardData(library_name="transformers", tags=["gpt2", OUR_TAG])
    Path("owner/model/README.md").write_text(f"---\n{data}\n---\n\n# model\n")
    home_of("owner/model")  # an export by Lockstep
    assert capsys.readouterr().err == ""
