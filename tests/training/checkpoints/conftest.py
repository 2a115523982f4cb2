"""Checkpoints that are damaged or on another file system, and scripts around train.py."""

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
    """Return a function that moves a folder to another file system, its place taken by a link or mount; or skip.

    It returns the folder there. Linux: a mount needs root.
    """
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=tmp_path if request.param == "bind mount" else MEMORY) as there:
        mounted: list[Path] = []

        def move(folder: Path) -> Path:
            other = Path(there) / "other"
            shutil.move(folder, other)
            if request.param == "link":
                folder.symlink_to(other)
                return other
            folder.mkdir()
            if subprocess.run(["mount", "--bind", other, folder], stderr=subprocess.DEVNULL, check=False).returncode:
                pytest.skip("needs the right to mount")
            mounted.append(folder)
            return other

        yield move
        for folder in mounted:
            subprocess.run(["umount", folder], check=True)
