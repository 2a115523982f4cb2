"""GPUs that torch cannot use are reported before a run costs anything, and memory errors are recognized."""

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
    too_few_gpus,
    use_gpu,
)

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


def machine(monkeypatch: pytest.MonkeyPatch, *, installed: int, usable: int, cuda: str | None = "13.0") -> None:
    """Emulate a machine. Its driver finds `installed` GPUs, and torch can use `usable` of them."""

    def is_available() -> bool:
        if installed and not usable:
            warnings.warn(OLD_DRIVER, stacklevel=1)
        return usable > 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(usable_gpus, "driver_gpus", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: usable, raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_device_is_a_gpu_unless_cpu_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, usable, requested, device in ((0, 0, None, "cpu"), (2, 2, None, "cuda"), (2, 0, "cpu", "cpu")):
        machine(monkeypatch, installed=installed, usable=usable)
        assert choose_device(requested) == device


@pytest.mark.filterwarnings("error")
def test_unusable_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = r"has 8 GPUs, but CUDA can use none: The NVIDIA driver on your system is too old \(found version 12080\)"
    advice = "update the driver, or install a torch build for the driver's CUDA version; --device cpu uses the CPU"
    for usable, cuda, line in (
        (0, "13.0", f"{problem}, and torch .* is built for CUDA 13.0; {advice}$"),
        (
            0,
            None,
            "CUDA can use none: torch .* is built without CUDA; install torch as in requirements.txt; --device",
        ),
        (
            7,
            "13.0",
            "CUDA can use 7: see nvidia-smi; to train on the usable GPUs, set CUDA_VISIBLE_DEVICES; --device cpu",
        ),
    ):
        machine(monkeypatch, installed=8, usable=usable, cuda=cuda)
        for requested in (None, "cuda"):
            with pytest.raises(BadInput, match=line):
                choose_device(requested)


def test_hidden_gpus_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, installed=8, usable=7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,7")
    assert choose_device(None) == "cuda"
    machine(monkeypatch, installed=8, usable=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(None) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(BadInput, match="has 1 GPU, but CUDA can use none"):
        choose_device(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without usable GPUs")
@pytest.mark.parametrize("command", [["train.py"], ["find_batch_size.py"], ["evaluate.py", "smoke"]])
def test_scripts_report_unusable_gpus_in_one_line(make_run: MakeRun, tmp_path: Path, command: list[str]) -> None:
    script, run = tmp_path / "script.py", make_run()
    script.write_text(SCRIPT_ON_A_GPU_MACHINE)
    done = launch.run(script, *command, str(run), environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{command[0]}: the NVIDIA driver has 1 GPU, but CUDA can use none: ")
    assert not (run / "metrics.jsonl").exists()


def test_busy_gpu_is_named_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: object) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable.\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(BadInput, match=r"^GPU 3 cannot be used: .* busy or unavailable; see nvidia-smi; ") as raised:
        use_gpu(torch.device("cuda", 3))
    assert raised.value.alone


def test_memory_errors_are_recognized() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60)
    for error in (failure.value, MemoryError()):
        assert is_memory_error(error) and not is_gpu_memory_error(error)
    for message in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        # The message on a slice of a GPU (MIG)
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165',
    ):
        assert is_memory_error(RuntimeError(message)) and is_gpu_memory_error(RuntimeError(message))
    assert not is_memory_error(RuntimeError("shapes do not match"))


def test_memory_advice_names_only_settings_not_in_use(make_run: MakeRun) -> None:
    train, run = load_run(ROOT / "runs" / "8xa100", []).train, Path("runs/mine")
    error = torch.OutOfMemoryError("CUDA out of memory")

    def advice(ranks: int, **keys: Any) -> str:
        return describe_memory_error(error, train.replace(**keys), run, ranks).partition("; ")[2]

    assert advice(8, microbatch_size=4) == "try --set microbatch_size=2, or find_batch_size.py runs/mine"
    single_sequence = {"microbatch_size": 1, "global_batch_size": 8}
    settings = advice(8, **single_sequence)
    assert "--set recompute_blocks=true" in settings and "--set parallel=fsdp" in settings
    for setting in re.findall(r"--set (\w+=\w+)", settings):  # a run accepts each setting that is advised
        load_run(make_run(setting.replace("=", "-"), microbatch_size=1), [setting])
    assert "fsdp" not in advice(8, **single_sequence, parallel="fsdp") + advice(1, **single_sequence)
    memory_options = {"parallel": "fsdp", "recompute_blocks": True, "loss_chunks": 8}
    assert advice(8, **single_sequence, **memory_options) == "use a larger GPU"


def test_gpu_advice_fits_how_the_run_was_started() -> None:
    assert too_few_gpus(0, 1).endswith("pass --device cpu to use the CPU, or leave --device out")
    assert too_few_gpus(2, 8).endswith("start torchrun with --nproc_per_node=2")
