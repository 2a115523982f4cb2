"""GPUs that torch cannot use, and a compiler that is missing, are told before a run costs anything."""

import ctypes
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import BadInput
from tests import launch
from training import job
from training.config.train_config import load_run
from training.hardware import preflight
from training.hardware.preflight import check_compiler, choose_device, driver_gpus

OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12080). Please update your GPU "
    "driver by downloading and installing a new version (Triggered internally at CUDAFunctions.cpp:119.)"
)
SCRIPT_ON_A_GPU_MACHINE = """
import runpy, sys
from training.hardware import preflight
preflight.driver_gpus = lambda: 8
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def machine(monkeypatch: pytest.MonkeyPatch, *, there: int, usable: int, cuda: str | None = "13.0") -> None:
    """Make this a machine whose driver has so many GPUs, so many of them usable by torch."""

    def is_available() -> bool:
        if there and not usable:
            warnings.warn(OLD_DRIVER, stacklevel=1)
        return usable > 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "driver_gpus", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: usable)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_the_device_is_what_is_there_unless_another_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, usable, wanted, chosen in ((0, 0, None, "cpu"), (2, 2, None, "cuda"), (2, 0, "cpu", "cpu")):
        machine(monkeypatch, there=there, usable=usable)
        assert choose_device(wanted) == chosen


@pytest.mark.filterwarnings("error")
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old = (
        r"has 8 GPUs, CUDA can use none: The NVIDIA driver on your system is too old \(found version 12080\), and torch"
    )
    for usable, cuda, line in (
        (0, "13.0", old + ".* is built for CUDA 13.0; update the driver, or install .*; --device cpu uses the CPU"),
        (0, None, "CUDA can use none: torch .* is built without CUDA; install the one of requirements.txt; --device"),
        (7, "13.0", "CUDA can use 7: see nvidia-smi; to train on those, set CUDA_VISIBLE_DEVICES; --device cpu"),
    ):
        machine(monkeypatch, there=8, usable=usable, cuda=cuda)
        for wanted in (None, "cuda"):
            with pytest.raises(BadInput, match=line):
                choose_device(wanted)


def test_gpus_that_the_user_hides_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, there=8, usable=7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,7")
    assert choose_device(None) == "cuda"
    machine(monkeypatch, there=8, usable=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(None) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(BadInput, match="has 1 GPU, CUDA can use none"):
        choose_device(None)


def test_the_driver_is_asked_by_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def library(status: int) -> Any:
        def count(number: Any) -> int:
            number._obj.value = 3
            return 0

        return SimpleNamespace(nvmlInit_v2=lambda: status, nvmlDeviceGetCount_v2=count)

    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(preflight, "DRIVER_GPUS", tmp_path)
    for status, gpus in ((0, 3), (18, 1)):  # 18: the library's version is not the kernel module's
        monkeypatch.setattr(ctypes, "CDLL", lambda name, status=status: library(status))
        assert driver_gpus() == gpus
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "NVML", "libabsent.so")
    assert driver_gpus() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs here can be used")
@pytest.mark.parametrize("command", [["train.py"], ["find_batch_size.py"], ["evaluate.py", "smoke"]])
def test_each_script_says_so_in_one_line(make_run: Callable[..., Path], tmp_path: Path, command: list[str]) -> None:
    script, run = tmp_path / "script.py", make_run()
    script.write_text(SCRIPT_ON_A_GPU_MACHINE)
    done = launch.run(script, *command, str(run), environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{command[0]}: the NVIDIA driver has 1 GPU, CUDA can use none: ")
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="needs gcc"
)
def test_the_real_compiler_finds_the_headers_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    check_compiler()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/absent"})
    with pytest.raises(BadInput, match=r"torch\.compile needs .*Python\.h"):
        check_compiler()


def test_a_missing_compiler_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    working, without_headers = tmp_path / "working", tmp_path / "without"
    working.write_text("#!/bin/sh\nexit 0\n")
    working.chmod(0o755)
    monkeypatch.setenv("CC", str(working))
    check_compiler()
    monkeypatch.delenv("CC")
    without_headers.write_text('#!/bin/sh\necho "<stdin>:2:10: fatal error: Python.h: No such file" >&2\nexit 1\n')
    without_headers.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for compiler, problem in (
        (None, "gcc is not found"),
        (str(without_headers), "fatal error: Python.h: No such file"),
        ("/absent/cc", "/absent/cc: No such file or directory"),
    ):
        if compiler is not None:
            monkeypatch.setenv("CC", compiler)
        with pytest.raises(
            BadInput, match=f"{problem}; run: sudo apt-get install build-essential python3.* compile=false"
        ):
            check_compiler()


def test_the_compiler_is_missed_before_tokens_are_downloaded(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/absent/cc")
    monkeypatch.setattr(job, "together", lambda _, work: work())
    monkeypatch.setattr(job, "open_tokens", lambda *_, **__: pytest.fail("tokens come first"))
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), coordinates=False)
    none: Any = None
    with pytest.raises(BadInput, match=r"torch\.compile needs a C compiler"):
        job._open_data(load_run(make_run(), []), none, ranks)
