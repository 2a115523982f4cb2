"""Preflight on emulated drivers: too old, with fewer usable GPUs than seen, without a compiler, and in order."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.cuda import emulated
from training.hardware.driver import TORCH_CUDA

Run = Callable[..., Path]
FIND = ROOT / "find_batch_size.py"


@pytest.mark.oldest_torch
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_old_driver_never_trains_on_the_cpu(make_small_run: Run, ranks: int) -> None:
    run = make_small_run()
    done = emulated.train(run, ranks=ranks, FAKEGPU_COUNT="2", FAKEGPU_OLD_DRIVER="1")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert line.startswith(
        "train.py: the NVIDIA driver has 2 GPUs, CUDA can use none: The NVIDIA driver on your system"
    )
    assert "(found version 12080)" in line and line.endswith("; --device cpu uses the CPU")
    assert not (run / "metrics.jsonl").exists() and emulated.exit_status(run) == 1


def test_an_old_driver_is_no_matter_on_a_cpu_that_was_asked_for(make_small_run: Run) -> None:
    run = make_small_run()
    done = emulated.train(run, "--device", "cpu", "--max-steps", "1", FAKEGPU_OLD_DRIVER="1")
    assert done.returncode == 0, done.stderr
    assert emulated.logged_steps(run) == [1]


def test_fewer_usable_gpus_than_the_driver_has_are_an_error(make_small_run: Run) -> None:
    for script in (ROOT / "train.py", FIND):
        done = emulated.run(script, make_small_run(script.stem), FAKEGPU_COUNT="4", FAKEGPU_USABLE="3")
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith(f"{script.name}: the NVIDIA driver has 4 GPUs, CUDA can use 3: see nvidia-smi; ")


def test_a_missing_compiler_ends_a_run_before_its_tokens_are_read(make_small_run: Run) -> None:
    run = make_small_run(compile=True, dataset="nobody/has-this")
    for script in (ROOT / "train.py", FIND):
        done = emulated.run(script, run, CC="/absent/cc")
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert (
            line.startswith(f"{script.name}: torch.compile")
            and " a C compiler and Python's headers: /absent/cc" in line
        )


def test_the_report_names_the_gpus_after_each_has_run_a_kernel(make_small_run: Run) -> None:
    done = emulated.train(make_small_run(compile=True), "--preflight", FAKEGPU_COUNT="8")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = ["GPUs", "GPUs tried", "compiler", "disk", "shared memory", "open files"]
    assert [line[:15].strip() for line in lines] == names
    assert lines[0].startswith("GPUs           ok       8 usable; driver for CUDA ")
    assert lines[1] == "GPUs tried     ok       8 x NVIDIA H100 80GB HBM3, 79.1 GiB"
    assert " MiB for 8 GPUs" in lines[4]


@pytest.mark.oldest_torch
def test_set_up_refuses_a_driver_older_than_torch_before_it_downloads_that() -> None:
    assert torch.version.cuda == TORCH_CUDA
    for old in ("0", "1"):
        done = emulated.run(Path("-m"), "training.hardware.driver", FAKEGPU_OLD_DRIVER=old)
        assert done.returncode == int(old), done.stderr
        assert ("the NVIDIA driver is too old: it supports CUDA 12.8, " in done.stderr) == (old == "1")


def test_set_up_reports_an_old_driver_and_everything_else(make_small_run: Run) -> None:
    done = emulated.run(Path("-m"), "training.hardware.preflight", FAKEGPU_COUNT="2", FAKEGPU_OLD_DRIVER="1")
    assert done.returncode == 1
    first, *others = done.stdout.splitlines()
    assert first.startswith("GPUs           problem  the NVIDIA driver has 2 GPUs, CUDA can use none: ")
    assert "usable" not in done.stdout
    assert [line.split()[0] for line in others] == ["compiler", "disk", "shared", "open"]
