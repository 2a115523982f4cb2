"""First call of every script, before torch is imported: the packages that it needs, and torch's memory allocator."""

import importlib.util
import os
import sys
from pathlib import Path

PACKAGES = (
    "attrs",
    "cattrs",
    "jaxtyping",
    "matplotlib",
    "numpy",
    "safetensors",
    "torch",
    "tqdm",
)  # what training imports
# torch's names of one setting: of torch 2.9 and later, and the older ones.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def begin(script: str) -> None:
    """Exit with one line where packages are missing; else set the allocator."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        made = (Path(__file__).parents[1] / ".venv" / "bin" / "activate").is_file()
        advice = "source .venv/bin/activate" if made else "make install && source .venv/bin/activate"
        sys.exit(f"{script}: this Python, {sys.executable}, has no module {missing[0]}; run: {advice}")
    use_expandable_segments()


def use_expandable_segments() -> None:
    """Have torch's CUDA allocator grow its segments, unless the user has set the allocator.

    Segments of fixed size leave pieces that nothing fits into: 3 to 20 % more memory than is used.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
