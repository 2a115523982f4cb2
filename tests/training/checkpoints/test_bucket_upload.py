"""Checkpoints in a bucket: uploads never delay or stop the training, and a run can be resumed from any machine."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.bucket import Bucket
from tests import launch
from tests.bucket_server import KEY, SECRET, BucketServer
from tests.conftest import MakeRun, metrics, one_line, only_line, write_run
from tests.launch import wait_until
from tests.training.checkpoints.conftest import FILES, IMPATIENT
from tests.walks import events, final_hash
from training.checkpoints.lookup import complete_steps
from training.checkpoints.saved_state import FIELDS_SHA256, fields_sha256

SECONDS = 120  # a job that takes longer counts as hanging
STEPS = {"min_train_tokens": 12 * 8 * 32, "checkpoint_interval": 2, "validation_interval": 4, "keep_checkpoints": 2}
pytestmark = pytest.mark.usefixtures("bucket_server")


def url(name: str) -> str:
    return f"s3://runs/{name}"


def train(run: Path, *options: str, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    return launch.run(IMPATIENT, str(run), "--device", "cpu", *options, ranks=ranks, environment=environment)


def succeed(run: Path, *options: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    done = train(run, *options, **keywords)
    assert done.returncode == 0, done.stderr
    return done


def start(run: Path, ranks: int = 1, **environment: str) -> launch.Process:
    return launch.start(IMPATIENT, str(run), "--device", "cpu", ranks=ranks, environment=environment)


def blank(run: Path, name: str) -> Path:
    """Return a new run directory with the configuration of another run, as on a new machine."""
    copy = run.with_name(name)
    copy.mkdir()
    for file in ("model.json", "train.json"):
        shutil.copy(run / file, copy)
    return copy


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> str:
    """The hash of an uninterrupted run without a bucket."""
    run = write_run(tmp_path_factory.mktemp("straight") / "run", token_files, **STEPS)
    succeed(run)
    return final_hash(run)


def test_blank_machine_resumes_from_the_bucket(make_run: MakeRun, straight: str) -> None:
    run = make_run("first", **STEPS, checkpoints=url("resumed"))
    succeed(run, "--max-steps", "6", ranks=2)
    bucket = Bucket(url("resumed"))
    assert complete_steps(bucket)[-1] == "step-00000006"
    for file in (run / "checkpoints" / "step-00000006").iterdir():
        assert bucket.read(f"step-00000006/{file.name}").content == file.read_bytes()
    assert bucket.read("latest").content == b"step-00000006"
    assert bucket.read("lease.json") is None  # the lease was deleted at the end of the job
    second = blank(run, "other")
    done = succeed(second)
    assert "downloading step-00000006 from s3://runs/resumed" in done.stdout
    assert final_hash(second) == straight
    assert complete_steps(bucket)[-1] == "step-00000012"
    assert len(complete_steps(bucket)) <= 3  # the newest two and the best one
    names = [file for file in bucket.objects() if not file.startswith(tuple(complete_steps(bucket)))]
    assert sorted(names) == ["best", "latest"]
    texts = [file.read_text(errors="replace") for file in second.rglob("*") if file.is_file()]
    texts += [bucket.read(name).content.decode(errors="replace") for name in bucket.objects()]
    assert not any(KEY in text or SECRET in text for text in texts)


def refuse_uploads(status: int) -> Callable[[str], int | None]:
    return lambda request: status if request.startswith(("PUT", "POST")) and "/step-" in request else None


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, 503, 507])
def test_failing_bucket_does_not_stop_training(
    make_run: MakeRun, bucket_server: BucketServer, straight: str, status: int
) -> None:
    run = make_run(f"refused-{status}", **STEPS, checkpoints=url(f"refused-{status}"))
    bucket_server.refusal = refuse_uploads(status)

    def recover(_: int) -> None:
        if events(run, "upload-failed"):
            bucket_server.refusal = lambda _: None

    bucket_server.before = recover
    done = succeed(run, ranks=2, SLOW_STEP="0.4")
    assert final_hash(run) == straight
    problem = str(events(run, "upload-failed")[0]["problem"])
    assert "Refused: by the test" in problem or "is still being uploaded" in problem
    assert "on the disk, but NOT UPLOADED" in done.stderr
    assert events(run, "upload")[-1]["step"] == 12
    assert complete_steps(Bucket(url(f"refused-{status}")))[-1] == "step-00000012"


@pytest.mark.slow
def test_training_does_not_wait_for_the_bucket(make_run: MakeRun, bucket_server: BucketServer, straight: str) -> None:
    run = make_run("stalled", **STEPS, checkpoints=url("stalled"))
    answering = threading.Event()
    bucket_server.before = lambda number: answering.wait() if "/step-" in bucket_server.requests[number - 1] else None
    process = start(run, ranks=2, BUCKET_SECONDS="120")
    wait_until(lambda: 12 in metrics(run, "train_loss"), process)
    assert not events(run, "upload")
    answering.set()
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert final_hash(run) == straight
    assert "is still being uploaded, because the bucket is slow" in errors
    assert events(run, "upload")[-1]["step"] == 12


@pytest.mark.slow
def test_second_job_waits_for_the_lease(make_run: MakeRun, straight: str) -> None:
    run = make_run("leased", **STEPS, checkpoints=url("leased"))
    process = start(run, SLOW_STEP="0.5")
    wait_until(lambda: events(run, "upload"), process)
    second = blank(run, "another")
    line = one_line(train(second))
    assert "another job uploads to this prefix" in line and str(run.resolve()) in line
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    done = succeed(second)
    assert "waiting 2 s" in done.stdout
    assert "downloading step-" in done.stdout
    assert final_hash(second) == straight


@pytest.mark.slow
def test_job_without_lease_trains_without_uploads(make_run: MakeRun, straight: str) -> None:
    run = make_run("lost", **STEPS, checkpoints=url("lost"))
    process = start(run, SLOW_STEP="0.4")
    wait_until(lambda: events(run, "upload"), process)
    # As if another job had taken the lease during a long network failure
    Bucket(url("lost")).write("lease.json", b"{}")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "another job now uploads to this prefix" in errors
    assert final_hash(run) == straight
    assert Bucket(url("lost")).read("lease.json").content == b"{}"
    assert complete_steps(Bucket(url("lost")))[-1] != "step-00000012"


@pytest.mark.slow
def test_damaged_bucket_checkpoints_are_skipped_or_refused(make_run: MakeRun, straight: str) -> None:
    run = make_run("named", **STEPS, checkpoints=url("named"))
    succeed(run, SLOW_STEP="0.3")
    bucket = Bucket(url("named"))
    newest, before = complete_steps(bucket)[::-1][:2]
    for file in FILES:
        bucket.write(f"step-00000014/{file}", bucket.read(f"{newest}/{file}").content)
    weights = bytearray(bucket.read(f"{newest}/model.safetensors").content)
    weights[-1] ^= 1
    bucket.write(f"{newest}/model.safetensors", bytes(weights))
    second = blank(run, "other")
    done = succeed(second, "--resume", "latest")
    problem = "state.json: step: got 12, wanted 14, as in the folder's name"
    wrong_name = f"{url('named')}/step-00000014: damaged: {problem}"
    assert wrong_name in done.stderr
    assert f"WARNING: {url('named')}/{newest}/model.safetensors: damaged" in done.stderr
    assert f"resuming from {second / 'checkpoints' / before}" in done.stdout
    assert final_hash(second) == straight
    third = blank(run, "third")  # the second run has uploaded intact checkpoints
    assert "the run is complete" in train(third).stdout
    assert final_hash(third) == straight
    for name in complete_steps(bucket):
        bucket.write(f"{name}/model.safetensors", b"cut")
    done = train(blank(run, "fourth"))
    assert "model.safetensors: got 3 bytes, wanted" in done.stderr
    assert 'no other checkpoint is intact: set "checkpoints" to another prefix' in one_line(done)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latest", "best", "step-00000008"])
def test_blank_machine_resumes_from_a_bucket_link(make_run: MakeRun, straight: str, name: str) -> None:
    run = make_run("linked", **STEPS, checkpoints=url(f"linked-{name}"))
    succeed(run, "--max-steps", "8")
    second = blank(run, "other")
    succeed(second, "--resume", name, "--max-steps", "8")
    assert [(second / "checkpoints" / link).readlink().name for link in ("latest", "best")] == ["step-00000008"] * 2
    succeed(second)
    assert final_hash(second) == straight


@pytest.mark.slow
def test_best_bucket_checkpoint_survives_new_machines(make_run: MakeRun, bucket_server: BucketServer) -> None:
    best = "step-00000002"
    # This learning rate ruins the model after the first checkpoint, which is therefore the best one.
    ruin = {"learning_rate": 0.5, "warmup_period_percent": 50, "keep_checkpoints": 1, "validation_interval": 2}
    run = make_run("first", **STEPS | ruin, checkpoints=url("outlives"))
    # The server refuses the best checkpoint until the newest one has been uploaded, so the best one has to be uploaded
    # after it.
    requests, refuse = bucket_server.requests, refuse_uploads(403)

    def refusal(request: str) -> int | None:
        return refuse(request) if best in request and "8/manifest" not in "".join(requests) else None

    bucket_server.refusal = refusal
    succeed(run, "--max-steps", "8", SLOW_STEP="0.3")
    bucket = Bucket(url("outlives"))
    losses = metrics(run, "validation_loss")
    assert best == f"step-{min(losses, key=losses.__getitem__):08d}"
    assert complete_steps(bucket) == [best, "step-00000008"] and bucket.read("latest").content == b"step-00000008"
    second = blank(run, "other")
    done = succeed(second)
    assert f"NOTE: the best checkpoint of the run, {best}, is not on this disk" in done.stderr
    assert bucket.read("best").content.decode() == best
    assert complete_steps(bucket) == [best, "step-00000012"]
    third = blank(run, "third")
    line = one_line(train(third, "--resume", "best"))
    assert 'has step-00000012, but "--resume best" would begin before that step' in line
    assert f'set "checkpoints" to another prefix ({best} is already on this disk)' in line
    done = succeed(third, "--resume", "best", "--set", f"checkpoints={url('outlives-2')}")
    assert f"resuming from {third / 'checkpoints' / best}" in done.stdout
    assert final_hash(third) == final_hash(second)


@pytest.mark.slow
def test_state_newer_than_its_manifest_is_accepted(make_run: MakeRun, straight: str) -> None:
    run = make_run("replaced", **STEPS, checkpoints=url("replaced"))
    succeed(run, "--max-steps", "4")
    state = json.loads((run / "checkpoints" / "step-00000004" / "state.json").read_text())
    state["elapsed_seconds"] += 1
    state[FIELDS_SHA256] = fields_sha256(state)
    Bucket(url("replaced")).write("step-00000004/state.json", json.dumps(state).encode())
    second = blank(run, "other")
    assert "at step 4 of" in succeed(second).stdout
    assert final_hash(second) == straight


@pytest.mark.slow
def test_second_branch_in_a_bucket_is_refused(make_run: MakeRun) -> None:
    run = make_run("branch", **STEPS, checkpoints=url("branch"))
    succeed(run, SLOW_STEP="0.3")
    for name in ("never", "step-00000010"):
        line = one_line(train(run, "--resume", name))
        assert f'has step-00000012, but "--resume {name}" would begin before that step' in line
        assert (run / "checkpoints" / "step-00000012").exists()
    succeed(run, "--resume", "never", "--set", f"checkpoints={url('branch-2')}")
    second = make_run("another-run", **STEPS | {"random_seed": 1})
    succeed(second)
    line = one_line(train(second, "--set", f"checkpoints={url('branch-2')}"))
    assert f"{url('branch-2')}/step-00000012: not the same checkpoint as {second / 'checkpoints'}" in line


@pytest.mark.parametrize(
    ("address", "environment", "problem"),
    [
        ("s3://none/x", {}, "s3://none/x/lease.json: cannot be read: AccessDenied"),
        (url("x"), {"AWS_SECRET_ACCESS_KEY": "wrong"}, "cannot be read: SignatureDoesNotMatch"),
        (url("x"), {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "check the network and the credentials"),
        ("ftp://x/y", {}, "checkpoints: got 'ftp://x/y', wanted null, or s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/x", {}, "without credentials"),
    ],
)
def test_unusable_bucket_gives_one_line(
    make_run: MakeRun, address: str, environment: dict[str, str], problem: str
) -> None:
    run = make_run(checkpoints=address)
    assert problem in only_line(train(run, **environment))
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_failed_upload_is_retried_by_the_next_job(make_run: MakeRun, straight: str) -> None:
    run, bucket = make_run("failing", **STEPS, checkpoints=url("failing")), Bucket(url("failing"))
    succeed(run, ranks=2, FAILS="1")
    assert final_hash(run) == straight
    assert {event["problem"] for event in events(run, "upload-failed")} >= {"RuntimeError: no reason"}
    assert complete_steps(bucket) == []
    assert "the run is complete" in succeed(run).stdout
    assert complete_steps(bucket) == ["step-00000012"]
