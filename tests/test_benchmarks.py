"""Benchmarks, as far as they go without a GPU."""

import math
import re

import pytest
import torch

from benchmarks.kernels import kind_of, table
from benchmarks.optimizers import sweep
from model.config import GPT2_SIZES
from tests import launch
from tests.conftest import ROOT


def test_kernels_are_told_apart_by_their_names() -> None:
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


def test_a_profiler_that_may_not_see_kernels_ends_no_benchmark() -> None:
    assert table({}, GPT2_SIZES["124M"], None).startswith("kernels: none were recorded")


@pytest.mark.slow
def test_predicted_memory_is_compared_with_a_real_forward_pass() -> None:
    done = launch.run(ROOT / "benchmarks" / "memory.py", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    ratios = [float(ratio) for ratio in re.findall(r"saved: predicted .* GiB, measured .*, ratio (.*)", done.stdout)]
    assert len(ratios) == 2 and all(0.99 < ratio < 1.01 for ratio in ratios)
    if not torch.cuda.is_available():
        done = launch.run(ROOT / "benchmarks" / "memory.py")
        assert done.returncode == 1
        assert done.stderr.startswith("memory.py: no GPU here; --device cpu") and done.stderr.count("\n") == 1


def test_a_sweep_ends_where_the_best_learning_rate_has_a_worse_one_on_either_side() -> None:
    for best in range(-8, 9):  # powers of sqrt(2)
        losses = sweep(lambda rates, best=best: [abs(2 * math.log2(rate) - best) for rate in rates], (0.5, 1.0, 2.0))
        tried = {round(2 * math.log2(rate), 6): loss for rate, loss in losses.items()}
        assert tried[best] == pytest.approx(0, abs=1e-9)
        assert {best - 1, best + 1} <= tried.keys()
