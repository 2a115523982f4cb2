"""A slice of a divided GPU (MIG), which has its own memory and no known peak; a GPU too old for bf16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import EXIT_ERROR
from tests.conftest import ROOT
from tests.cuda.emulated import logged_steps, records, run, train
from tests.cuda.test_train import finished, refused

MakeRun = Callable[..., Path]
SLICE = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
ON_A_SLICE = {"gpu": "a100-mig", "CUDA_VISIBLE_DEVICES": "MIG-0000aaaa"}


@pytest.mark.oldest_torch
def test_a_slice_trains_without_mfu(make_small_run: MakeRun) -> None:
    directory = make_small_run()
    assert f"1 x {SLICE}, one process, bf16" in finished(train(directory, **ON_A_SLICE))
    assert logged_steps(directory) == [1, 2, 3, 4]
    assert {record["mfu"] for record in records(directory) if "train_loss" in record} == {None}


def test_preflight_reports_the_memory_of_the_slice(make_small_run: MakeRun) -> None:
    assert f"1 x {SLICE}, 19.5 GiB" in finished(train(make_small_run(), "--preflight", **ON_A_SLICE))


@pytest.mark.parametrize(
    ("visible", "problem"),
    [
        ({"CUDA_VISIBLE_DEVICES": "MIG-0000aaaa,MIG-0000bbbb"}, "got 1 GPUs for 2 ranks on this machine"),
        ({}, "the NVIDIA driver has 2 GPUs, CUDA can use 1: see nvidia-smi; "),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "GPU 1 cannot be used: CUDA error: invalid device ordinal; see nvidia-smi"),
    ],
    ids=["two slices", "two divided GPUs", "two divided GPUs, chosen"],
)
def test_ranks_cannot_share_slices(make_small_run: MakeRun, visible: dict[str, str], problem: str) -> None:
    assert problem in refused(train(make_small_run(), ranks=2, gpu="a100-mig", **visible))


@pytest.mark.oldest_torch
def test_a_slice_that_is_too_small_is_an_error_of_memory(make_small_run: MakeRun) -> None:
    directory = make_small_run(microbatch_size=4)  # torch raises no OutOfMemoryError there
    line = refused(train(directory, FAKEGPU_GIB="0.022", **ON_A_SLICE))
    assert "rank 0: the GPU's memory does not hold microbatch_size 4; try --set microbatch_size=2" in line
    done = run(ROOT / "find_batch_size.py", directory, FAKEGPU_GIB="0.03", **ON_A_SLICE)
    assert done.returncode == EXIT_ERROR and "not even one sequence of 64 tokens fits" in done.stderr


@pytest.mark.parametrize("settings", [{}, {"determinism": "elastic", "compile": True}], ids=["off", "compiled elastic"])
def test_a_gpu_too_old_for_bf16_trains_in_fp16(make_small_run: MakeRun, settings: dict[str, Any]) -> None:
    directory = make_small_run(**settings)
    done = train(directory, gpu="t4", determinism=settings.get("determinism", "off"))
    assert "1 x Tesla T4, one process, fp16" in finished(done)
    assert {record["mfu"] for record in records(directory) if "train_loss" in record} == {None}


def test_a_precision_without_fused_attention_is_refused(make_small_run: MakeRun) -> None:
    line = refused(train(make_small_run(precision="bf16"), gpu="t4"))
    assert "model.json: no fused attention kernel supports 2 heads of width 64 in bf16 on Tesla T4 (flash: " in line
