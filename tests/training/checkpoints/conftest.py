"""Checkpoints that are damaged, and the script that crashes while it saves one."""

from tests.conftest import ROOT

CRASH = ROOT / "tests" / "training" / "checkpoints" / "crash.py"
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)
