"""A finished run, to be copied and damaged."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, train, write_run

CRASH = ROOT / "tests" / "training" / "checkpoints" / "crash.py"
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> Path:
    """A run with two checkpoints. Tests read it, or change a copy."""
    run = write_run(tmp_path_factory.mktemp("finished") / "run", token_files)
    assert train(run).returncode == 0
    return run


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)
