"""train.py on several kinds of emulated GPU: all branches, from the first step to resuming and failures."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from common.json_files import read_json
from tests.conftest import ROOT, MakeRun, one_line
from tests.cuda.emulated import (
    atomic_kernels,
    cache_of,
    checkpoint_step,
    compiled_for,
    disturbed,
    events,
    exit_status,
    finished,
    logged_steps,
    records,
    run,
    start,
    train,
)
from tests.launch import wait_until

TRAIN = ROOT / "train.py"
WAIT_SECONDS = 120
SLICE = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"  # a slice of a divided GPU, with its own memory and an unknown peak speed
ON_A_SLICE = {"gpu": "a100-mig", "CUDA_VISIBLE_DEVICES": "MIG-0000aaaa"}


@pytest.mark.oldest_torch
def test_two_ranks_train_validate_save_and_end(make_small_run: MakeRun) -> None:
    directory = make_small_run(compile=None, validation_interval=4)
    output = finished(train(directory, "--price-per-hour", "20", "--hash-every", "2", ranks=2))
    assert "2 x NVIDIA H100 80GB HBM3, ddp, bf16, compiled, determinism off" in output
    assert logged_steps(directory) == [1, 2, 3, 4] and checkpoint_step(directory) == 4
    assert events(directory) == [("start", 0), ("end", 4)] and exit_status(directory) == EXIT_DONE
    measured = [record for record in records(directory) if "mfu" in record]
    assert all(record["mfu"] > 0 and record["peak_memory_bytes"] > 0 for record in measured)
    assert [record["step"] for record in records(directory) if "state_sha256" in record] == [2, 4]
    numerics = read_json(directory / "resolved.json")["numerics"]
    assert numerics["device"] == "NVIDIA H100 80GB HBM3" and numerics["nccl"]
    assert numerics["attention"] in ("flash", "efficient", "cudnn")  # the fastest kernel


@pytest.mark.oldest_torch
def test_a_run_resumes_on_other_layouts(make_small_run: MakeRun) -> None:
    directory = make_small_run(min_train_tokens=6 * 8 * 64)
    drift = "--allow-numerics-drift"
    finished(train(directory, "--max-steps", "2", ranks=2))
    finished(train(directory, "--max-steps", "4", "--set", "parallel=fsdp", drift, ranks=2))
    finished(train(directory, drift))
    assert logged_steps(directory) == [1, 2, 3, 4, 5, 6] and checkpoint_step(directory) == 6
    worlds = [record["world_size"] for record in records(directory) if record.get("event") == "start"]
    assert worlds == [2, 2, 1]


@pytest.mark.oldest_torch
@pytest.mark.parametrize(("parallel", "gpu"), [("ddp", "h100"), ("fsdp", "a100-80gb")])
def test_elastic_passes_its_self_test_without_atomics(make_small_run: MakeRun, parallel: str, gpu: str) -> None:
    directory = make_small_run(compile=None, determinism="elastic", parallel=parallel)
    output = finished(train(directory, ranks=2, gpu=gpu, determinism="elastic"))
    assert f"{parallel}, bf16, compiled, determinism elastic" in output
    self_tests = [record for record in records(directory) if record.get("event") == "self-test"]
    assert len(self_tests) == 1 and self_tests[0]["tensors"] == 28
    kernels = cache_of(gpu, "elastic")
    assert compiled_for(kernels) <= {"sm_80", "sm_90", "sm_90a"} and compiled_for(kernels)
    assert atomic_kernels(kernels) == []


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_failed_self_test_only_warns(make_small_run: MakeRun, parallel: str) -> None:
    directory = make_small_run(determinism="run", precision="fp16", parallel=parallel)
    done = disturbed("differing_gradients", TRAIN, directory, ranks=2)
    assert finished(done)
    assert "gradients of the same step differ between two runs (first: final_norm.weight; 1 of 28" in done.stderr
    [self_test] = [record for record in records(directory) if record.get("event") == "self-test"]
    assert not self_test["held"] and logged_steps(directory) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"compile": "model"},
        {"compile": True, "recompute_blocks": True, "loss_chunks": 2},
        {"precision": "fp32"},
        {"determinism": "run", "model": {"drop_rate": 0.1}},
        {"compile": True, "precision": "fp16", "model": {"drop_rate": 0.1}, "determinism": "run"},
    ],
    ids="-".join,
)
def test_other_settings_train(make_small_run: MakeRun, settings: dict[str, Any]) -> None:
    directory = make_small_run(**settings)
    level = settings.get("determinism", "off")
    finished(train(directory, ranks=2, determinism=level))
    assert logged_steps(directory) == [1, 2, 3, 4] and checkpoint_step(directory) == 4


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"optimizer": "muon"}], ids="-".join)
def test_a_run_resumes_and_repeats_steps(make_small_run: MakeRun, settings: dict[str, Any]) -> None:
    directory = make_small_run(**settings)
    finished(train(directory, "--max-steps", "2", ranks=2))
    finished(train(directory, ranks=2))
    assert logged_steps(directory) == [1, 2, 3, 4] and checkpoint_step(directory) == 4
    # The replay's exit status is not checked: it depends on the losses, which are noise on an emulated GPU.
    output = train(directory, "--replay", "3", "4", ranks=2).stdout
    assert "at step 2; nothing is written" in output and len(re.findall("^ +[34]  train_loss", output, re.M)) == 2


def test_a_bad_step_ends_the_run(make_small_run: MakeRun) -> None:
    directory = make_small_run()
    done = disturbed("bad_step", TRAIN, directory, ranks=2)
    assert "step 2: the loss is not finite on rank 1; the update was not applied" in done.stdout + done.stderr
    assert exit_status(directory) == EXIT_DIVERGED and events(directory)[-1] == ("diverged", 2)


def test_a_signal_saves_and_the_run_continues(make_small_run: MakeRun) -> None:
    directory = make_small_run(min_train_tokens=4000 * 8 * 64, max_epochs=100)
    process = start(TRAIN, directory, ranks=2)
    log = directory / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(logged_steps(directory)) > 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(WAIT_SECONDS)
    assert exit_status(directory) == EXIT_STOPPED, errors
    stopped = checkpoint_step(directory)
    assert 3 < stopped < 4000 and events(directory)[-1] == ("stopped", stopped)
    finished(train(directory, "--max-steps", stopped + 2, ranks=2))
    assert checkpoint_step(directory) == stopped + 2


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_without_memory_gives_advice(make_small_run: MakeRun, parallel: str) -> None:
    directory = make_small_run(parallel=parallel, microbatch_size=4)
    done = disturbed("small_second_gpu", TRAIN, directory, ranks=2, SECOND_GPU_GIB="0.022")
    assert done.returncode == EXIT_ERROR
    advice = (
        "rank 1: the GPU's memory is too small for microbatch_size 4; try --set microbatch_size=2, or find_batch_size"
    )
    assert advice in done.stderr
    assert not (directory / "checkpoints").exists()


def test_uncompiled_runs_need_no_compiler(make_small_run: MakeRun, tmp_path: Path) -> None:
    assert "not compiled" in finished(train(make_small_run(), PATH=str(tmp_path), CC=""))


def test_idle_gpus_are_named(make_small_run: MakeRun) -> None:
    done = train(make_small_run(), FAKEGPU_COUNT="8")
    assert finished(done) and "WARNING: 7 of this machine's 8 GPUs are idle" in done.stderr


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_steps_between_logs_never_wait_for_the_gpu(make_small_run: MakeRun, parallel: str) -> None:
    steps = {"min_train_tokens": 120 * 8 * 64, "log_interval": 200, "checkpoint_interval": 200}
    directory = make_small_run(**steps, parallel=parallel)
    done = disturbed("recorded_loop", TRAIN, directory, ranks=2)
    assert finished(done).count("waits: {}, pageable copies: []") == 2
    assert finished(done).count("timed: 115 steps, own work in each") == 2


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_three_ranks_with_uneven_shares_train(make_small_run: MakeRun, parallel: str) -> None:
    directory = make_small_run(parallel=parallel, microbatch_size=1, global_batch_size=8)
    output = finished(train(directory, ranks=3, determinism="elastic"))
    assert "8 micro-batches on 3 ranks: at most 3 each, 89% of the ranks' time used" in output
    assert logged_steps(directory) == [1, 2, 3, 4] and checkpoint_step(directory) == 4


def test_models_with_many_layers_train(make_small_run: MakeRun) -> None:
    model = {"n_layers": 12, "scale_attention_by_inverse_layer": True}
    directory = make_small_run(model=model, compile=True, validation_interval=4)
    finished(train(directory))
    assert logged_steps(directory) == [1, 2, 3, 4]


@pytest.mark.oldest_torch
def test_a_slice_trains_without_mfu(make_small_run: MakeRun) -> None:
    directory = make_small_run()
    assert f"1 x {SLICE}, one process, bf16" in finished(train(directory, **ON_A_SLICE))
    assert logged_steps(directory) == [1, 2, 3, 4]
    assert {record["mfu"] for record in records(directory) if "train_loss" in record} == {None}


def test_preflight_reports_the_memory_of_the_slice(make_small_run: MakeRun) -> None:
    assert f"1 x {SLICE}, 19.5 GiB" in finished(train(make_small_run(), "--preflight", **ON_A_SLICE))


@pytest.mark.oldest_torch
def test_a_slice_that_is_too_small_is_reported(make_small_run: MakeRun) -> None:
    directory = make_small_run(microbatch_size=4)  # on a slice, torch does not raise OutOfMemoryError
    line = one_line(train(directory, FAKEGPU_GIB="0.022", **ON_A_SLICE))
    assert "rank 0: the GPU's memory is too small for microbatch_size 4; try --set microbatch_size=2" in line
    line = one_line(run(ROOT / "find_batch_size.py", directory, FAKEGPU_GIB="0.03", **ON_A_SLICE))
    assert "not even one sequence of 64 tokens fits" in line


@pytest.mark.parametrize("settings", [{}, {"determinism": "elastic", "compile": True}], ids=["off", "compiled elastic"])
def test_a_gpu_too_old_for_bf16_trains_in_fp16(make_small_run: MakeRun, settings: dict[str, Any]) -> None:
    directory = make_small_run(**settings)
    done = train(directory, gpu="t4", determinism=settings.get("determinism", "off"))
    assert "1 x Tesla T4, one process, fp16" in finished(done)
    assert {record["mfu"] for record in records(directory) if "train_loss" in record} == {None}


def test_a_precision_without_fused_attention_is_refused(make_small_run: MakeRun) -> None:
    line = one_line(train(make_small_run(precision="bf16"), gpu="t4"))
    assert "model.json: no fused attention kernel supports 2 heads of width 64 in bf16 on Tesla T4 (flash: " in line
