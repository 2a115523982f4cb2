"""Verification: damage of any file of a checkpoint is found and named."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.conftest import forge_manifest
from tests.training.checkpoints.conftest import FILES, flipped
from training.checkpoints.disk import on_disk
from training.checkpoints.verification import verify


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_found_by_name(finished: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "step-00000008"
    shutil.copytree(finished / "checkpoints" / "step-00000008", checkpoint)
    assert verify(on_disk(checkpoint)) is None
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
        problem = verify(on_disk(checkpoint))
        assert problem is not None
        assert name in problem
    file.unlink()
    assert name in str(verify(on_disk(checkpoint)))


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(copied: Path, name: str) -> None:
    path = copied / "checkpoints" / "step-00000008"
    (path / name).unlink()
    os.mkfifo(path / name)
    assert str(path / name) in str(verify(on_disk(path)))


def test_deeply_nested_json_in_a_checkpoint_is_damage(copied: Path) -> None:
    for name in ("manifest.json", "state.json"):
        path = copied / "checkpoints" / ("step-00000008" if name == "manifest.json" else "step-00000004")
        (path / name).write_text("[" * 100_000)
        forge_manifest(path) if name == "state.json" else None
        assert f"{path / name}: " in str(verify(on_disk(path)))
        assert "nested deeper than 100" in str(verify(on_disk(path)))
