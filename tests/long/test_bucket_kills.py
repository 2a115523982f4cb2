"""A kill at every request to a bucket, before it arrives or once it is done: a blank machine resumes, bits equal."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from common.bucket import Bucket
from tests import launch
from tests.bucket_server import BucketServer
from tests.training.checkpoints.conftest import IMPATIENT
from tests.walks import final_hash
from training.checkpoints.bucket_checkpoints import complete_steps, fetch
from training.checkpoints.directory import checkpoints_of

KEYS = {"min_train_tokens": 6 * 8 * 32, "checkpoint_interval": 2, "validation_interval": 2, "keep_checkpoints": 1}
SECONDS = 120  # a hang


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_request_loses_no_checkpoint_that_the_bucket_has(
    make_run: Callable[..., Path], bucket_server: BucketServer, moment: str
) -> None:
    straight = make_run("straight", **KEYS)
    assert start(straight).wait(SECONDS) == 0
    killed, number = True, 0
    while killed:
        number += 1
        prefix = f"s3://runs/killed-{moment}-{number}"
        run, blank = (make_run(f"{name}-{number}", **KEYS, checkpoints=prefix) for name in ("killed", "blank"))
        bucket_server.calm()
        process = start(run, SLOW_STEP="0.1")

        def kill(request: int, process: launch.Process = process, number: int = number) -> None:
            if request == number:
                os.killpg(process.pid, signal.SIGKILL)

        setattr(bucket_server, moment, kill)
        killed = process.wait(SECONDS) == -signal.SIGKILL
        bucket_server.calm()
        bucket = Bucket(prefix)
        held = complete_steps(bucket)
        for name in held:
            assert fetch(bucket, checkpoints_of(run.with_name(f"fetched-{number}")) / name) is None
        resumed = start(blank)
        output, errors = resumed.communicate(SECONDS)
        assert resumed.returncode == 0, errors
        assert f"downloading {held[-1]}" in output if held else "downloading" not in output
        assert final_hash(blank) == final_hash(straight), number
        names = {path.partition("/")[0] for path in bucket.sizes()}
        assert names <= {"latest", "best", *complete_steps(bucket)}, number  # nothing is left behind
        print(f"{moment} request {number}: {'killed' if killed else 'not reached'}, {held[-1] if held else 'nothing'}")
    assert number > 20


def start(run: Path, **environment: str) -> launch.Process:
    patient = {"BUCKET_SECONDS": "60", **environment}  # the server is a process of a busy machine
    return launch.start(IMPATIENT, str(run), "--device", "cpu", environment=patient)
