"""The command after `--then` runs once when a run has finished or stopped with a checkpoint, and never otherwise."""

import os
import signal

import pytest

from tests.bucket_server import BucketServer
from tests.conftest import MakeRun, complete, train
from tests.training.checkpoints.test_bucket_upload import refuse_uploads, url
from tests.training.supervision.runs import LONG, outcome, start, wait_for_step

NOTE = "cat {run}/exit.json >> {run}/ran; test -e {run}/checkpoints/latest/manifest.json; env > {run}/environment"


@pytest.mark.parametrize("ranks", [1, 2])
def test_then_command_runs_once_without_torchrun_variables(make_run: MakeRun, ranks: int) -> None:
    run = make_run()
    done = complete(run, "--max-steps", "2", "--then", NOTE.format(run=run) + "; exit 7", ranks=ranks)
    assert done.stdout.splitlines()[-1] == "--then: ended with status 7"
    assert (run / "ran").read_text().count('"done"') == 1
    names = {line.partition("=")[0] for line in (run / "environment").read_text().splitlines()}
    assert "PATH" in names and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK"} & names


def test_then_command_ends_before_torchrun_ends_ranks(make_run: MakeRun) -> None:
    run = make_run(**LONG)
    process = start(run, 2, "--then", f"sleep 2; {NOTE.format(run=run)}")
    wait_for_step(run, 3, process)
    os.kill(process.children()[1], signal.SIGTERM)  # only this rank gets the signal, not torchrun
    output, errors = process.communicate()
    assert outcome(run) == "stopped" and (run / "ran").read_text().count('"outcome": "stopped"') == 1, errors
    assert "--then: ended with status 0" in output


@pytest.mark.parametrize(
    ("options", "file_bytes"),
    [(["--set", "microbatch_size=0"], None), (["--set", "learning_rate=1e30"], None), (["--max-steps", "2"], 20_000)],
)
def test_then_command_never_runs_after_a_failure(make_run: MakeRun, options: list[str], file_bytes: int | None) -> None:
    run = make_run()
    done = train(run, *options, "--then", f"touch {run}/ran", file_bytes=file_bytes)
    assert done.returncode in (1, 3) and "--then" not in done.stdout
    assert not (run / "ran").exists()


def test_then_command_needs_the_checkpoint_in_the_bucket(make_run: MakeRun, bucket_server: BucketServer) -> None:
    run = make_run(checkpoints=url("then"))
    bucket_server.refusal = refuse_uploads(403)
    done = train(run, "--max-steps", "2", "--then", f"touch {run}/ran")
    assert done.stdout.splitlines()[-1] == "--then: NOT RUN: the last checkpoint is not in the bucket", done.stderr
    bucket_server.refusal = lambda _: None
    assert not (run / "ran").exists()
    # There is nothing left to train.
    assert train(run, "--max-steps", "2", "--then", f"touch {run}/ran").returncode == 0
    assert (run / "ran").exists()
