"""Preflight on emulated drivers: an old driver, unusable GPUs, a missing compiler, and a machine without problems."""

import re
from pathlib import Path

import pytest
import torch

from common.errors import EXIT_ERROR
from tests.conftest import ROOT, MakeRun, one_line
from tests.cuda import emulated
from tests.cuda.emulated import finished
from training.hardware.driver import TORCH_CUDA

TRAIN, FIND = ROOT / "train.py", ROOT / "find_batch_size.py"
OLD = {"FAKEGPU_COUNT": "2", "FAKEGPU_OLD_DRIVER": "1"}
OLD_DRIVER = r"the NVIDIA driver has 2 GPUs, but CUDA can use none: The NVIDIA driver on .*\(found version 12080\)"
FEWER = {"FAKEGPU_COUNT": "4", "FAKEGPU_USABLE": "3"}
THREE_OF_FOUR = "the NVIDIA driver has 4 GPUs, but CUDA can use 3: see nvidia-smi; "
NO_COMPILER = "GPU kernels of torch.compile.* a C compiler and Python's headers: /absent/cc"
DIVIDED = {"gpu": "a100-mig"}
TWO_SLICES = DIVIDED | {"CUDA_VISIBLE_DEVICES": "MIG-0000aaaa,MIG-0000bbbb"}
REFUSED: list[tuple[Path, int, dict[str, str], str]] = [
    (FIND, 1, OLD, OLD_DRIVER),
    (TRAIN, 1, FEWER, THREE_OF_FOUR),
    (FIND, 1, FEWER, THREE_OF_FOUR),
    (TRAIN, 1, {"CC": "/absent/cc"}, NO_COMPILER),
    (FIND, 1, {"CC": "/absent/cc"}, NO_COMPILER),
    (TRAIN, 2, TWO_SLICES, "--device cuda: got 1 GPU for 2 ranks on this machine"),
    (TRAIN, 2, DIVIDED, "the NVIDIA driver has 2 GPUs, but CUDA can use 1: see nvidia-smi; "),
    (TRAIN, 2, DIVIDED | {"CUDA_VISIBLE_DEVICES": "0,1"}, "GPU 1 cannot be used: .* invalid device ordinal; see n"),
]
REFUSED_ON_OLDEST_TORCH: list[tuple[Path, int, dict[str, str], str]] = [
    (TRAIN, 1, OLD, f"{OLD_DRIVER}.*; --device cpu uses the CPU$"),
    (TRAIN, 2, OLD, f"{OLD_DRIVER}.*; --device cpu uses the CPU$"),
    (TRAIN, 1, {"FAKEGPU_COUNT": "2", "FAKEGPU_USABLE": "1"}, "the NVIDIA driver has 2 GPUs, but CUDA can use 1"),
    (TRAIN, 2, {"FAKEGPU_COUNT": "1"}, "--device cuda: got 1 GPU for 2 ranks on this machine"),
]


@pytest.mark.parametrize(
    ("script", "ranks", "variables", "line"),
    [*REFUSED, *(pytest.param(*case, marks=pytest.mark.oldest_torch) for case in REFUSED_ON_OLDEST_TORCH)],
)
def test_unusable_gpus_are_one_early_line(
    make_small_run: MakeRun, script: Path, ranks: int, variables: dict[str, str], line: str
) -> None:
    run = make_small_run(compile=True, dataset="nobody/has-this")
    done = emulated.run(script, run, ranks=ranks, **variables)
    assert re.match(f"{script.name}: {line}", one_line(done))
    assert ranks > 1 or done.stderr.count("\n") == 1
    assert not (run / "metrics.jsonl").exists() and not (run / "checkpoints").exists()
    assert (script, variables) != (TRAIN, OLD) or emulated.exit_status(run) == EXIT_ERROR


@pytest.mark.parametrize("variables", [{}, {"FAKEGPU_OLD_DRIVER": "1"}], ids=["usable GPUs", "old driver"])
def test_the_cpu_is_used_on_request(make_small_run: MakeRun, variables: dict[str, str]) -> None:
    run = make_small_run()
    assert "2 x CPU, ddp, fp32, not compiled" in finished(emulated.train(run, "--device", "cpu", ranks=2, **variables))
    assert emulated.logged_steps(run) == [1, 2, 3, 4]


def test_the_report_names_gpus_that_ran_a_kernel(make_small_run: MakeRun) -> None:
    lines = finished(emulated.train(make_small_run(compile=True), "--preflight", FAKEGPU_COUNT="8")).splitlines()
    names = ["GPUs", "GPUs tried", "compiler", "disk", "shared memory", "open files"]
    assert [line[:15].strip() for line in lines] == names
    assert lines[0].startswith("GPUs           ok       8 usable; driver for CUDA ")
    assert lines[1] == "GPUs tried     ok       8 x NVIDIA H100 80GB HBM3, 79.1 GiB"
    assert " MiB for 8 GPUs" in lines[4]


@pytest.mark.oldest_torch
def test_setup_refuses_an_old_driver_before_downloading_torch() -> None:
    assert torch.version.cuda == TORCH_CUDA
    for old in ("0", "1"):
        done = emulated.run(Path("-m"), "training.hardware.driver", FAKEGPU_OLD_DRIVER=old)
        assert done.returncode == int(old), done.stderr
        assert ("the NVIDIA driver is too old: it supports CUDA 12.8, " in done.stderr) == (old == "1")


def test_setup_reports_an_old_driver_and_other_facts(make_small_run: MakeRun) -> None:
    done = emulated.run(Path("-m"), "training.hardware.preflight", FAKEGPU_COUNT="2", FAKEGPU_OLD_DRIVER="1")
    assert done.returncode == 1
    first, *more_lines = done.stdout.splitlines()
    assert first.startswith("GPUs           problem  the NVIDIA driver has 2 GPUs, but CUDA can use none: ")
    assert "usable" not in done.stdout
    assert [line.split()[0] for line in more_lines] == ["compiler", "disk", "shared", "open"]
