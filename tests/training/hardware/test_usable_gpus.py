"""GPUs that torch cannot use are told before a run costs anything; errors of memory are told from others."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import BadInput
from tests import launch
from tests.conftest import ROOT, MakeRun
from training.config.train_config import load_run
from training.hardware import usable_gpus
from training.hardware.usable_gpus import (
    choose_device,
    describe_memory_error,
    is_gpu_memory_error,
    is_memory_error,
    use_gpu,
)
from training.parallel.process_group import too_few_gpus

OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12080). Please update your GPU "
    "driver by downloading and installing a new version (Triggered internally at CUDAFunctions.cpp:119.)"
)
SCRIPT_ON_A_GPU_MACHINE = """
import runpy, sys
from training.hardware import preflight, usable_gpus
preflight.driver_gpus = usable_gpus.driver_gpus = lambda: 8
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
    monkeypatch.setattr(usable_gpus, "driver_gpus", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: usable, raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_the_device_is_what_is_there_unless_another_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, usable, wanted, chosen in ((0, 0, None, "cpu"), (2, 2, None, "cuda"), (2, 0, "cpu", "cpu")):
        machine(monkeypatch, there=there, usable=usable)
        assert choose_device(wanted) == chosen


@pytest.mark.filterwarnings("error")
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old = r"has 8 GPUs, but CUDA can use none: The NVIDIA driver on your system is too old \(found version 12080\), and torch"
    for usable, cuda, line in (
        (0, "13.0", old + ".* is built for CUDA 13.0; update the driver, or install .*; --device cpu uses the CPU"),
        (0, None, "CUDA can use none: torch .* is built without CUDA; install the torch in requirements.txt; --device"),
        (
            7,
            "13.0",
            "CUDA can use 7: see nvidia-smi; to train on the usable ones, set CUDA_VISIBLE_DEVICES; --device cpu",
        ),
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
    with pytest.raises(BadInput, match="has 1 GPU, but CUDA can use none"):
        choose_device(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs here can be used")
@pytest.mark.parametrize("command", [["train.py"], ["find_batch_size.py"], ["evaluate.py", "smoke"]])
def test_each_script_says_so_in_one_line(make_run: MakeRun, tmp_path: Path, command: list[str]) -> None:
    script, run = tmp_path / "script.py", make_run()
    script.write_text(SCRIPT_ON_A_GPU_MACHINE)
    done = launch.run(script, *command, str(run), environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{command[0]}: the NVIDIA driver has 1 GPU, but CUDA can use none: ")
    assert not (run / "metrics.jsonl").exists()


def test_a_gpu_that_is_busy_or_broken_is_named_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: object) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable.\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(BadInput, match=r"^GPU 3 cannot be used: .* busy or unavailable; see nvidia-smi; ") as raised:
        use_gpu(torch.device("cuda", 3))
    assert raised.value.alone


def test_errors_of_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60)
    for error in (failure.value, MemoryError()):
        assert is_memory_error(error) and not is_gpu_memory_error(error)
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165',  # of a slice
    ):
        assert is_memory_error(RuntimeError(words)) and is_gpu_memory_error(RuntimeError(words))
    assert not is_memory_error(RuntimeError("shapes do not match"))


def test_memory_advice_is_what_the_run_lacks(make_run: MakeRun) -> None:
    train, run = load_run(ROOT / "runs" / "8xa100", []).train, Path("runs/mine")
    error = torch.OutOfMemoryError("CUDA out of memory")

    def advice(ranks: int, **keys: Any) -> str:
        return describe_memory_error(error, train.replace(**keys), run, ranks).partition("; ")[2]

    assert advice(8, microbatch_size=4) == "try --set microbatch_size=2, or find_batch_size.py runs/mine"
    one = {"microbatch_size": 1, "global_batch_size": 8}
    every = advice(8, **one)
    assert "--set recompute_blocks=true" in every and "--set parallel=fsdp" in every
    for setting in re.findall(r"--set (\w+=\w+)", every):  # each is a setting that the run takes
        load_run(make_run(setting.replace("=", "-"), microbatch_size=1), [setting])
    assert "fsdp" not in advice(8, **one, parallel="fsdp") + advice(1, **one)
    saving = {"parallel": "fsdp", "recompute_blocks": True, "loss_chunks": 8}
    assert advice(8, **one, **saving) == "use a larger GPU"


def test_advice_about_gpus_fits_the_start() -> None:
    assert too_few_gpus(0, 1).endswith("pass --device cpu to train on the CPU, or leave --device out")
    assert too_few_gpus(2, 8).endswith("start torchrun with --nproc_per_node=2")
