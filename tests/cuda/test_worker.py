"""Worker of the batch-size search on an emulated GPU of 10 GiB: trials that barely fit are not counted as fitting."""

import pytest

from tests.conftest import ROOT
from tests.cuda.emulated import run


@pytest.mark.parametrize(
    ("allocations", "found"),
    [
        (["torch=9"], "Report(allocated=9663676416, "),
        (["torch=9.6"], "CUDA out of memory."),  # less than 5 % would be left
        (["torch=9", "library=0.8"], "less than 5% of the GPU would be left"),
        (["torch=5", "torch=6"], "the allocator had to empty its cache: slow, and close to failing"),
    ],
    ids=["fits", "beyond the headroom", "a library takes the headroom", "cache emptied"],
)
def test_a_trial_fits_only_with_headroom_and_without_retries(allocations: list[str], found: str) -> None:
    done = run(ROOT / "tests" / "cuda" / "scripted_trial.py", *allocations, FAKEGPU_GIB="10")
    assert done.stdout.startswith(found), done.stderr
