"""What tests of training share: a clock that the test turns, and few tokens beside the many."""

import os
import time
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import ROOT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small module's bytes, 33 windows of 32, nothing held out."""
    directory = tmp_path_factory.mktemp("tokens") / "few"
    source = str(Path(os.__file__).with_name("keyword.py"))
    options = ("--output", str(directory), "--tokenizer", "bytes", "--validation-fraction", "0")
    launch.run(ROOT / "prepare_data.py", source, *options).check_returncode()
    return directory
