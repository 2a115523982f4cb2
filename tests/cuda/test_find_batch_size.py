"""find_batch_size.py on emulated GPUs whose memory is limited."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import EXIT_DONE, EXIT_ERROR
from tests.conftest import ROOT
from tests.cuda.emulated import run

SCRIPT = ROOT / "find_batch_size.py"
ANY_BATCH = {"global_batch_size": None, "microbatch_size": 1}


def largest(output: str) -> int:
    """Return the micro-batch that a search has found."""
    found = re.search(r"^largest micro-batch that fits.*: (\d+)", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1])


@pytest.mark.oldest_torch
def test_the_search_ends_at_the_memory_of_the_gpu_and_writes_it(make_small_run: Callable[..., Path]) -> None:
    directory = make_small_run(microbatch_size=1, global_batch_size=1 << 16)
    done = run(SCRIPT, directory, "--write", FAKEGPU_GIB="0.25")
    assert done.returncode == EXIT_DONE, done.stderr
    size = largest(done.stdout)
    assert size > 1 and f"micro-batch {size}: fits, at its peak" in done.stdout
    assert "does not fit on rank 0: " in done.stdout
    assert json.loads((directory / "train.json").read_text())["microbatch_size"] == size


def test_the_rank_with_the_least_memory_decides(make_small_run: Callable[..., Path]) -> None:
    directory = make_small_run(**ANY_BATCH, parallel="fsdp")
    script = ROOT / "tests" / "cuda" / "small_second_gpu.py"
    done = run(script, SCRIPT, directory, ranks=2, FAKEGPU_GIB="0.5", SECOND_GPU_GIB="0.25")
    assert done.returncode == EXIT_DONE, done.stderr
    assert largest(done.stdout) >= 1 and "does not fit on rank 1: " in done.stdout


def test_one_sequence_that_does_not_fit_is_said_with_remedies(make_small_run: Callable[..., Path]) -> None:
    done = run(SCRIPT, make_small_run(**ANY_BATCH), FAKEGPU_GIB="0.03")
    assert done.returncode == EXIT_ERROR
    assert "not even one sequence of 64 tokens fits; predicted to fit: " in done.stderr


def test_a_gpu_that_cuda_cannot_use_is_refused(make_small_run: Callable[..., Path]) -> None:
    done = run(SCRIPT, make_small_run(), FAKEGPU_OLD_DRIVER="1")
    assert done.returncode == EXIT_ERROR and done.stderr.count("\n") == 1
    assert "CUDA can use none" in done.stderr
