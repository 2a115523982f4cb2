"""Every command in the README, the tutorial and the page on chat is run, in a fresh copy of the repository.

Only what a test machine lacks is replaced. Commands for GPUs become dry runs with the same world size. The hub is on
loopback, and its text is tokenized as bytes, because GPT-2's tokenizer would need the network. The quickstart and the
toy dialogue take a few steps with a smaller model. Commands that are the same after these changes are run only once.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.conftest import metrics
from tests.hub_server import Hub, serve
from tests.hub_server import environment as at_hub
from tests.launch import ROOT, execute

HANG_SECONDS = 2400  # ten times the duration on two idle cores
FINEWEB_CARD = """---
configs:
- config_name: sample-10BT
  data_files: sample/10BT/*.parquet
---
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "fineweb" / "sample" / "10BT"
    folder.mkdir(parents=True)
    (tmp_path / "fineweb" / "README.md").write_text(FINEWEB_CARD)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a document"] * 300}), folder / "000.parquet")
    with serve({"HuggingFaceFW/fineweb": tmp_path / "fineweb"}) as server:
        yield server


def commands() -> list[str]:
    """Return the commands in bash blocks, and the torchrun commands in tables.

    Console blocks are skipped, because they need another machine.
    """
    # The tutorial comes first, because it activates the environment.
    pages = "\n".join((ROOT / page).read_text() for page in ("docs/tutorial.md", "docs/chat.md", "README.md"))
    blocks = re.findall(r"```bash\n(.*?)```", pages, re.DOTALL)
    in_table = re.findall(r"`(torchrun [^`]+)`", pages)
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()
    return [line for line in lines if line and not line.startswith("#")] + in_table


def adapt(command: str) -> str:
    """Change a command so that a test machine can run it."""
    command = re.sub(r"min_train_tokens=\d+", "min_train_tokens=20000", command)
    many = re.search(r"--nproc_per_node=(\d+) train\.py runs/(?!quickstart)", command)
    if many:
        command = re.sub(r"torchrun .*?train\.py", "python train.py", command) + f" --dry-run --world-size {many[1]}"
    return command + " --tokenizer bytes" if "hf:" in command else command


@pytest.mark.slow
@pytest.mark.timeout(HANG_SECONDS + 60)
def test_every_command_of_the_readme_runs(clone: Path, hub: Hub) -> None:
    hub.new = clone / "cache"
    assert len(commands()) >= 10
    script = "set -euo pipefail\n"
    for command in dict.fromkeys(map(adapt, commands())):
        script += f"echo {json.dumps('+ ' + command)}\n{command}\n"
    environment = at_hub(hub, None) | {"PYTHON": sys.executable}
    done = execute("bash", "-c", script, cwd=clone, seconds=HANG_SECONDS, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(metrics(clone / "runs" / "quickstart", "validation_loss")) == [0, 3, 6]
    assert "--resume never: earlier results are now in" in done.stdout  # the second start of the quickstart
    assert "24,874 steps x 131,072" in done.stdout
    assert json.loads((clone / "token_files" / "fineweb-10b" / "manifest.json").read_text())["documents"] == 300
    assert re.search(r"\d+ of 48 right", done.stdout)
    assert "\ndisk           ok       " in done.stdout and "\n  source .venv/bin/activate\n" in done.stdout


def test_an_old_python_is_one_line(clone: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.8.18;; *) exit 1;; esac\n')
    old.chmod(0o755)
    (clone / ".venv").unlink()
    for python, version in ((str(old), "Python 3.8.18"), ("absent-python", "")):
        done = execute("make", "train", f"PYTHON={python}", cwd=clone)
        assert done.returncode == 2
        first = done.stderr.splitlines()[0]
        assert first.startswith(f"Python 3.10 or newer is missing: {python} is")
        assert version in first
        assert not (clone / ".venv").exists()


# Code that imitates a driver for CUDA 12.8 with one GPU.
DRIVER = """
import ctypes
from types import SimpleNamespace
def answer(number):
    def call(target):
        target._obj.value = number
        return 0
    return call
plain = ctypes.CDLL
fake = {
    "libnvidia-ml.so.1": SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=answer(1)),
    "libcuda.so.1": SimpleNamespace(cuDriverGetVersion=answer(12080)),
}
ctypes.CDLL = lambda name, *rest, **options: fake.get(name) or plain(name, *rest, **options)
"""


def set_up_with_a_driver(clone: Path, tools: Path) -> Any:
    tools.mkdir()
    for name, text in (("nvidia-smi", "#!/bin/sh\n"), ("gcc", "#!/bin/sh\n"), ("sitecustomize.py", DRIVER)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(tools)}
    environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "0"}
    return execute("./setup_lambda.sh", cwd=clone, **environment)


def test_setup_refuses_an_old_driver_before_downloading(clone: Path, tmp_path: Path) -> None:
    (clone / ".venv").unlink()
    done = set_up_with_a_driver(clone, tmp_path / "tools")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("setup_lambda.sh: the NVIDIA driver is too old: it supports CUDA 12.8, but the torch in ")
    assert not (clone / ".venv").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs of this machine are usable")
def test_setup_explains_why_gpus_cannot_train(clone: Path, tmp_path: Path) -> None:
    done = set_up_with_a_driver(clone, tmp_path / "tools")
    assert done.returncode == 1
    assert done.stderr == "setup_lambda.sh: this machine cannot train yet: see the problem above\n"
    assert "\nGPUs           problem  the NVIDIA driver has 1 GPU, but CUDA can use none: " in done.stdout
    assert "usable" not in done.stdout and "ready" not in done.stdout
