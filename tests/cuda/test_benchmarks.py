"""Benchmarks on emulated GPUs: they end with their tables. Their seconds are of no GPU."""

import re

import pytest

from common.errors import EXIT_DONE
from tests.conftest import ROOT
from tests.cuda.emulated import run

SPEED = "--sizes small --steps 3 --step-tokens 4096 --ranks 2 --set compile=false"


@pytest.mark.oldest_torch
def test_speed_of_two_ranks() -> None:
    done = run(ROOT / "benchmarks" / "train_speed.py", *SPEED.split(), FAKEGPU_COUNT="2")
    assert done.returncode == EXIT_DONE, done.stderr
    assert len(re.findall(r"^tokens/s +[\d,]+$", done.stdout, re.MULTILINE)) == 1


def test_predicted_memory_beside_the_allocators() -> None:
    words = ["--sizes", "124M", "--cards", "rtx3090-24gb"]
    done = run(ROOT / "benchmarks" / "memory.py", *words, FAKEGPU_GIB="30")
    assert done.returncode == EXIT_DONE, done.stderr
    ratios = [float(ratio) for ratio in re.findall(r"allocated: .* ratio ([\d.]+)", done.stdout)]
    assert len(ratios) == 3 and all(0.95 <= ratio <= 1.05 for ratio in ratios)
