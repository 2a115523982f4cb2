"""Missing packages give a one-line error, and the allocator is set up before torch is imported.

Ctrl-C while a file is being read is not reported as damage to the file.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import EXIT_ERROR, EXIT_INTERRUPTED, BadInput
from common.script import ALLOCATOR_SETTINGS, Script, use_expandable_segments
from tests.conftest import ROOT
from tests.test_house import ENTRY_SCRIPTS


@pytest.mark.parametrize("script", ENTRY_SCRIPTS)
def test_missing_packages_are_explained(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bare = [sys.executable, "-S", "-B", script, "runs/quickstart"]  # -S: no site-packages
    process = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    [line] = process.stderr.splitlines()
    assert line.startswith(f"{script}: this Python, {sys.executable}, has no module attrs; run: ")
    assert line.endswith("source .venv/bin/activate")


@pytest.mark.parametrize("setting", [None, *ALLOCATOR_SETTINGS])
def test_the_allocator_uses_expandable_segments(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    environment = {} if setting is None else {setting: "max_split_size_mb:512"}
    monkeypatch.setattr(os, "environ", dict(environment))
    use_expandable_segments()
    assert os.environ == (environment or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_ctrl_c_during_reading_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")

    def interrupt(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def read() -> None:
        try:
            load_file(tmp_path / "weights")
        except Exception as error:  # like a loader, which converts any error
            raise BadInput(f"weights: {error}") from error

    monkeypatch.setattr(torch.UntypedStorage, "__len__", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore SIGINT
    try:
        with Script("evaluate.py") as script:
            script.interrupted = "; results are kept"
            read()
        assert script.status == EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "evaluate.py: interrupted; results are kept\n"
    (tmp_path / "weights").write_bytes(b"damaged")
    with Script("evaluate.py") as script:
        read()
    assert script.status == EXIT_ERROR
