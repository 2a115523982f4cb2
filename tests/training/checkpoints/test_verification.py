"""Manifest: damage of any file is found and named; a damaged checkpoint is passed over, a missing one explained."""

import os
import random
import shutil
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import forge_manifest, train
from tests.training.checkpoints.conftest import FILES, flipped
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.verification import find, find_before, verify


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_found_by_name(finished: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "step-00000008"
    shutil.copytree(finished / "checkpoints" / "step-00000008", checkpoint)
    assert verify(checkpoint) is None
    file = checkpoint / name
    intact = file.read_bytes()
    draw = random.Random(name)
    positions = range(len(intact)) if len(intact) < 2000 else [draw.randrange(len(intact)) for _ in range(200)]
    damaged = [flipped(intact, position, draw.randrange(8)) for position in positions]
    page = draw.randrange(max(1, len(intact) // 4096)) * 4096
    damaged.append(intact[:page] + bytes(len(intact[page : page + 4096])) + intact[page + 4096 :])
    damaged += [intact[:-1], b"", intact + b"\0"]
    for content in damaged:
        file.write_bytes(content)
        problem = verify(checkpoint)
        assert problem is not None
        assert name in problem
    file.unlink()
    assert name in str(verify(checkpoint))


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(copied: Path, name: str) -> None:
    path = copied / "checkpoints" / "step-00000008"
    (path / name).unlink()
    os.mkfifo(path / name)
    assert str(path / name) in str(verify(path))


def test_deeply_nested_json_in_a_checkpoint_is_damage(copied: Path) -> None:
    for name in ("manifest.json", "state.json"):
        path = copied / "checkpoints" / ("step-00000008" if name == "manifest.json" else "step-00000004")
        (path / name).write_text("[" * 100_000)
        forge_manifest(path) if name == "state.json" else None
        assert f"{path / name}: " in str(verify(path))
        assert "nested deeper than 100" in str(verify(path))


def test_a_damaged_checkpoint_is_passed_over_loudly_and_set_aside(finished: Path, copied: Path) -> None:
    run = copied
    newest = run / "checkpoints" / "step-00000008"
    weights = newest / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), -1000, 0))
    done = train(run, ranks=2)
    assert done.returncode == 0, done.stderr
    assert f"WARNING: {weights}: damaged: its sha256 is not the one in manifest.json" in done.stderr
    assert "falling back to step-00000004" in done.stderr
    assert verify(newest) is None  # written again
    assert len(list((run / "archive").glob("*/checkpoints/step-00000008"))) == 1
    # Byte for byte what one rank had written: the layout of the files does not depend on who writes them.
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest / name).read_bytes() == (finished / "checkpoints" / newest.name / name).read_bytes()


def test_a_run_with_nothing_but_a_kept_copy_says_how_to_continue(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copied / "checkpoints"
    (directory / "step-00000008").rename(directory / "kept")
    shutil.rmtree(directory / "step-00000004")
    with pytest.raises(
        BadInput, match="refers to step-00000008, which does not exist; continue from a copy with --resume kept"
    ):
        find(checkpoints_of(copied), "auto")
    for link in ("latest", "best"):
        (directory / link).unlink()
    assert find(checkpoints_of(copied), "auto") is None
    assert capsys.readouterr().out == f"NOTE: {directory}: found only kept; --resume kept continues from it\n"


def test_a_run_whose_links_name_nothing_does_not_begin_anew_in_silence(copied: Path) -> None:
    for name in ("step-00000004", "step-00000008"):
        shutil.rmtree(copied / "checkpoints" / name)
    with pytest.raises(
        BadInput, match="latest: refers to step-00000008, which does not exist; copy it here again, or start anew"
    ):
        find(checkpoints_of(copied), "auto")


def test_a_checkpoint_is_found_by_name_link_or_step(finished: Path) -> None:
    directory = checkpoints_of(finished)
    found = [find(directory, wanted) for wanted in ("auto", "latest", "best", "step-00000004")]
    assert [checkpoint.name for checkpoint in found if checkpoint][::3] == ["step-00000008", "step-00000004"]
    assert str(found[1]) == str(finished / "checkpoints" / "step-00000008")
    with pytest.raises(
        BadInput, match="checkpoints/nothing: no such checkpoint; there are best, latest, step-00000004"
    ):
        find(directory, "nothing")
    earlier = [find_before(directory, step) for step in (9, 8, 4)]
    assert [checkpoint and checkpoint.name for checkpoint in earlier] == ["step-00000008", "step-00000004", None]
