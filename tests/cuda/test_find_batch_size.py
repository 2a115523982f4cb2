"""find_batch_size.py on emulated GPUs with limited memory: a trial that barely fits counts as too large."""

import json
import re

import pytest

from tests.conftest import ROOT, MakeRun, one_line
from tests.cuda.emulated import disturbed, run

SCRIPT = ROOT / "find_batch_size.py"
ANY_BATCH = {"global_batch_size": None, "microbatch_size": 1}


def largest(output: str) -> int:
    """Return the largest micro-batch in the output of a search."""
    match = re.search(r"^largest micro-batch that fits.*: (\d+)", output, re.MULTILINE)
    assert match is not None, output
    return int(match[1])


@pytest.mark.oldest_torch
def test_the_search_finds_the_memory_limit(make_small_run: MakeRun) -> None:
    directory = make_small_run(microbatch_size=1, global_batch_size=1 << 16)
    done = run(SCRIPT, directory, "--write", FAKEGPU_GIB="0.25")
    size = largest(done.stdout)
    assert size > 1 and f"micro-batch {size}: fits; peak memory" in done.stdout
    assert "does not fit on rank 0: " in done.stdout
    assert json.loads((directory / "train.json").read_text())["microbatch_size"] == size


def test_the_rank_with_the_least_memory_decides(make_small_run: MakeRun) -> None:
    directory = make_small_run(**ANY_BATCH, parallel="fsdp")
    done = disturbed("small_second_gpu", SCRIPT, directory, ranks=2, FAKEGPU_GIB="0.5", SECOND_GPU_GIB="0.25")
    assert largest(done.stdout) >= 1 and "does not fit on rank 1: " in done.stdout


def test_a_sequence_that_does_not_fit_gives_advice(make_small_run: MakeRun) -> None:
    line = one_line(run(SCRIPT, make_small_run(**ANY_BATCH), FAKEGPU_GIB="0.03"))
    assert "not even one sequence of 64 tokens fits; predicted to fit: " in line


@pytest.mark.parametrize(
    ("allocations", "message"),
    [
        (["torch=9"], "Report(allocated=9663676416, "),
        (["torch=9.6"], "CUDA out of memory."),  # less than 5% would be left
        (["torch=9", "library=0.8"], "less than 5% of the GPU's memory would be left"),
        (
            ["torch=5", "torch=6"],
            "the allocator had to empty its cache, which is slow and means that memory is almost full",
        ),
    ],
    ids=["fits", "beyond the headroom", "a library takes the headroom", "cache emptied"],
)
def test_a_trial_fits_only_with_headroom_and_without_retries(allocations: list[str], message: str) -> None:
    done = disturbed("trial", *allocations, FAKEGPU_GIB="10")
    assert done.stdout.startswith(message), done.stderr
