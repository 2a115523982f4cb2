"""Kernels that torch.compile has made: sources and PTX in its cache."""

import re
from pathlib import Path

ATOMIC_PTX = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:atom|red)\.", re.MULTILINE)
ATOMIC_SOURCE = "tl.atomic"


def compiled_for(cache: Path) -> set[str]:
    """Return the architectures that kernels in a cache were compiled for, such as sm_90a."""
    return {
        found[1] for path in cache.rglob("*.ptx") if (found := re.search(r"^\.target (\w+)", path.read_text(), re.M))
    }


def atomic_kernels(cache: Path) -> list[str]:
    """Return the names of the kernels in a cache that add up in no fixed order."""
    machine = [path.stem for path in cache.rglob("*.ptx") if ATOMIC_PTX.search(path.read_text())]
    source = [path.name for path in cache.rglob("*.py") if ATOMIC_SOURCE in path.read_text()]
    return sorted({*machine, *source})
