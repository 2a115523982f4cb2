"""Helpers that damage checkpoints or move them to another file system, and paths of scripts that run train.py."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, slow

CRASH, IMPATIENT = (ROOT / "tests" / "training" / "checkpoints" / name for name in ("crash.py", "impatient.py"))
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")
MEMORY = Path("/dev/shm")


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


@pytest.fixture(params=["link", "mount", *slow("bind mount")])
def move_elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Return a function that moves a folder to another file system and replaces it with a link or a mount.

    The function returns the folder's new path. The test is skipped if there is no second file system, or if mounting is
    not permitted. On Linux, mounting needs root.
    """
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=tmp_path if request.param == "bind mount" else MEMORY) as elsewhere:
        mounted: list[Path] = []

        def move(folder: Path) -> Path:
            new_folder = Path(elsewhere) / "other"
            shutil.move(folder, new_folder)
            if request.param == "link":
                folder.symlink_to(new_folder)
                return new_folder
            folder.mkdir()
            mount = ["mount", "--bind", new_folder, folder]
            if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
                pytest.skip("needs the right to mount")
            mounted.append(folder)
            return new_folder

        yield move
        for folder in mounted:
            subprocess.run(["umount", folder], check=True)
