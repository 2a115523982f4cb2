"""Errors that end train.py: each error has a reason, and a user's error has a line to print."""

import errno

import pytest
import torch

from common.errors import REASONS, BadInput, Diverged
from common.files import write_error
from tests.conftest import MakeRun
from training.config.train_config import load_run
from training.hardware.usable_gpus import memory_advice
from training.supervision.rank_failure import describe_error


@pytest.mark.parametrize(
    ("error", "reason", "has_line"),
    [
        (BadInput("no"), "user-error", True),
        (BadInput("no", reason="out-of-budget"), "out-of-budget", True),
        (write_error("x", OSError(errno.ENOSPC, "full")), "disk-full", True),
        (write_error("x", OSError(errno.EACCES, "no")), "user-error", True),
        (Diverged("step 3"), "non-finite", True),
        (MemoryError(), "out-of-memory", True),
        (torch.OutOfMemoryError("CUDA out of memory"), "out-of-memory", True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out-of-memory", True),
        (OSError(errno.EDQUOT, "quota", "file"), "disk-full", True),
        (FileNotFoundError(errno.ENOENT, "none", "file"), "user-error", True),
        (ConnectionError("reset"), "crash", False),
        (KeyError("--max-hours"), "crash", False),
        (RuntimeError("disk full"), "crash", False),
    ],
)
def test_every_error_has_a_reason(make_run: MakeRun, error: Exception, reason: str, *, has_line: bool) -> None:
    assert describe_error(error)[0] == reason  # as if the error had occurred before the run was read
    try:
        with memory_advice(load_run(make_run(), ())):
            raise error
    except Exception as raised:  # noqa: BLE001
        actual, line = describe_error(raised)
    assert actual == reason and actual in REASONS and (line is not None) is has_line
