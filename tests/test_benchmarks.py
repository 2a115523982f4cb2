"""Tests of benchmarks that need no GPU."""

import math
import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import bench
import kernels
import pytest
import torch
import train_speed
from beside_nanogpt import CPU_CONDITION, _stepper
from kernels import kind_of, table
from torch.autograd import DeviceType

from common.errors import BadInput
from common.script import ALLOCATOR_SETTINGS
from model.config import GPT2_SIZES, ModelConfig
from tests.conftest import TINY_MODEL
from training.hardware.gpus import known_gpus


def test_kernels_are_classified_by_name() -> None:
    kinds = {
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": "matmul",
        "aten::addmm": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x64_4x1x1_kernel0_0": "attention",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)": "attention",
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_0": "loss",
        "triton_poi_fused__scaled_dot_product_flash_attention_view_3": "elementwise",
        "triton_poi_fused_addmm_gelu_view_5": "elementwise",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdamMathFunctor...>": "optimizer",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)": "communication",
        "Memcpy HtoD (Pinned -> Device)": "elementwise",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_benchmarks_configure_the_allocator_as_the_scripts_do() -> None:
    assert any(name in os.environ for name in ALLOCATOR_SETTINGS)  # set when the benchmarks were imported


def test_benchmarks_work_without_kernel_profiles() -> None:
    assert table({}, GPT2_SIZES["124M"], None).startswith("kernels: none were recorded")


def test_gpu_profiles_count_only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, seconds: float, kind: DeviceType = DeviceType.CUDA, **details: object) -> SimpleNamespace:
        return SimpleNamespace(key=name, device_type=kind, self_device_time_total=1e6 * seconds, **details)

    events = [
        event("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 3.0),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 1.0),
        event("Optimizer.step#AdamW.step", 2.0, is_user_annotation=True),
        event("aten::mm", 0.0, DeviceType.CPU),
    ]
    profiled = nullcontext(SimpleNamespace(key_averages=lambda: events))
    monkeypatch.setattr(kernels, "profile", lambda activities: profiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seconds = kernels.kernel_seconds(lambda: None)
    assert seconds == {"matmul": 3.0, "communication": 1.0}
    first, second, *more_lines = table(seconds, GPT2_SIZES["124M"], known_gpus()["h100-80gb"]).splitlines()[2:]
    assert first.split()[:3] == ["matmul", "3,000.0", "75.0%"]
    assert second.split() == ["communication", "1,000.0", "25.0%", "-"]
    assert {line.split()[0] for line in more_lines} == {"attention", "elementwise", "loss"}


def test_a_slow_trainer_is_killed_at_the_deadline(tmp_path: Path) -> None:
    with _stepper([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", 1, 0.0) as seconds:
        assert list(seconds) == []


@pytest.mark.slow
def test_a_measured_run_is_killed_after_its_last_step(tmp_path: Path) -> None:
    run = bench.prepare(tmp_path, ModelConfig(**TINY_MODEL), 5000, microbatch_size=1, global_batch_size=2)
    records = bench.train(run, 2, kill_after=3)
    steps = [record["step"] for record in records if "train_loss" in record]
    assert 3 <= steps[-1] < 5000 and not (run / "checkpoints").exists()
    with pytest.raises(BadInput, match=r"train\.py failed: .*microbatch_size"):
        bench.train(run, 1, "microbatch_size=-1", kill_after=3)


def test_seconds_are_per_step(tmp_path: Path) -> None:
    code = "import os, time; time.sleep(0.2); os.write(1, b'iter 0\\n' * 10); time.sleep(600)"
    began = time.perf_counter()
    with _stepper([sys.executable, "-c", code], tmp_path / "log", 1, math.inf) as steps:
        wall, _ = next(steps)
    assert 10 * wall <= time.perf_counter() - began


def test_tables_are_printed_when_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(f"import time  # {CPU_CONDITION}\ntime.sleep(600)")
    (tmp_path / "model.py").touch()
    (tmp_path / "configurator.py").touch()
    train_speed.main(train_speed.SpeedBenchmark(beside_nanogpt=tmp_path, not_compiled=True, minutes=0.0))
    printed = capsys.readouterr().out
    for precision in ("fp32", "bf16"):
        assert re.search(rf"{precision}: 0 of 10 steps within 0 minutes", printed)
    assert len(re.findall("^.+? over the limit  over the limit$", printed, re.MULTILINE)) == 2 * 2
