"""Tests with torch's CUDA build and the emulated driver of tests/fakegpu. They run only with `make test-cuda`.

The driver computes nothing, so losses are noise. The tests check promises that do not depend on computed values.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MakeRun
from tests.cuda import emulated

FOLDER = Path(__file__).parent
SMALL = {"context_length": 64, "emb_dim": 128, "n_heads": 2}  # fused attention supports heads of width 64


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("cuda")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share compiled kernels and measurements between workers. End the session if there is no emulated driver."""
    if torch.version.cuda is None or "libcuda" not in os.environ.get("LD_PRELOAD", ""):
        pytest.exit("tests/cuda needs torch's CUDA build and the emulated driver: make test-cuda", returncode=2)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ[emulated.CACHES] = str(shared / "compiled")


@pytest.fixture
def make_small_run(make_run: MakeRun) -> MakeRun:
    """Return a function that writes a run directory with a small network. Keywords override train.json.

    By default, the network is not compiled. It is not validated either, because that would compile another graph.
    """

    def make(name: str = "run", model: dict[str, Any] | None = None, **train: Any) -> Path:
        return make_run(name, SMALL | (model or {}), **({"validation_interval": None, "compile": False} | train))

    return make
