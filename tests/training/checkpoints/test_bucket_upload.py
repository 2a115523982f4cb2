"""Checkpoints in a bucket: uploaded behind the training, which no bucket stalls or stops, and resumed from anywhere."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.bucket import Bucket
from tests import launch
from tests.bucket_server import KEY, SECRET, BucketServer, serve_bucket
from tests.conftest import ROOT
from training.checkpoints.bucket_checkpoints import complete_steps
from training.telemetry.metrics_log import read_metrics

IMPATIENT = ROOT / "tests" / "training" / "checkpoints" / "impatient.py"
STEPS = {"min_train_tokens": 12 * 8 * 32, "checkpoint_interval": 2, "validation_interval": 4, "keep_checkpoints": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with serve_bucket(tmp_path_factory.mktemp("bucket") / "seaweedfs") as server:
        yield server


@pytest.fixture
def server(served: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    served.calm()
    for name, value in served.environment().items():
        monkeypatch.setenv(name, value)
    return served


def url(name: str) -> str:
    return f"s3://runs/{name}"


def train(run: Path, *options: str, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    return launch.run(IMPATIENT, str(run), "--device", "cpu", *options, ranks=ranks, environment=environment)


def blank(run: Path, name: str) -> Path:
    """Return a run directory with the configuration of another, as on a new machine."""
    other = run.with_name(name)
    other.mkdir()
    for file in ("model.json", "train.json"):
        shutil.copy(run / file, other)
    return other


def last_hash(run: Path) -> str:
    return json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["state_sha256"]


def events(run: Path, kind: str) -> list[dict[str, object]]:
    return [record for record in read_metrics(run) if record.get("event") == kind]


@pytest.fixture
def straight(make_run: Callable[..., Path]) -> str:
    """Return the hash of an uninterrupted run without a bucket."""
    run = make_run("straight", **STEPS)
    assert train(run).returncode == 0
    return last_hash(run)


def test_a_blank_machine_resumes_from_the_bucket_with_the_same_hash(
    make_run: Callable[..., Path], server: BucketServer, straight: str
) -> None:
    run = make_run("first", **STEPS, checkpoints=url("resumed"))
    begun = train(run, "--max-steps", "6", ranks=2)
    assert begun.returncode == 0, begun.stderr
    bucket = Bucket(url("resumed"))
    assert complete_steps(bucket)[-1] == "step-00000006"
    for file in (run / "checkpoints" / "step-00000006").iterdir():
        assert bucket.read(f"step-00000006/{file.name}").content == file.read_bytes()
    assert bucket.read("latest").content == b"step-00000006"
    assert bucket.read("lease.json") is None  # ended with the job
    other = blank(run, "other")
    done = train(other)
    assert done.returncode == 0, done.stderr
    assert "downloading step-00000006 from s3://runs/resumed" in done.stdout
    assert last_hash(other) == straight
    assert complete_steps(bucket)[-1] == "step-00000012"
    assert len(complete_steps(bucket)) <= 3  # two, and the best
    names = [file for file in bucket.sizes() if not file.startswith(tuple(complete_steps(bucket)))]
    assert sorted(names) == ["best", "latest"]
    texts = [file.read_text(errors="replace") for file in other.rglob("*") if file.is_file()]
    texts += [bucket.read(name).content.decode(errors="replace") for name in bucket.sizes()]
    assert not any(KEY in text or SECRET in text for text in texts)


def refuse_uploads(status: int) -> Callable[[str], int | None]:
    return lambda asked: status if asked.startswith(("PUT", "POST")) and "/step-" in asked else None


@pytest.mark.parametrize("status", [503, 507, 403])
def test_a_failing_or_full_bucket_stops_no_training_and_the_next_checkpoint_is_tried(
    make_run: Callable[..., Path], server: BucketServer, straight: str, status: int
) -> None:
    run = make_run(f"refused-{status}", **STEPS, checkpoints=url(f"refused-{status}"))
    server.refusal = refuse_uploads(status)

    def recover(_: int) -> None:
        if events(run, "upload-failed"):
            server.refusal = lambda _: None

    server.before = recover
    done = train(run, ranks=2, SLOW_STEP="0.4")
    assert done.returncode == 0, done.stderr
    assert last_hash(run) == straight
    failed, uploaded = events(run, "upload-failed"), events(run, "upload")
    assert "Refused: by the test" in str(failed[0]["problem"]) or "still under way" in str(failed[0]["problem"])
    assert "NOT UPLOADED, it is on the disk" in done.stderr
    assert uploaded[-1]["step"] == 12
    assert complete_steps(Bucket(url(f"refused-{status}")))[-1] == "step-00000012"


def test_a_bucket_that_never_answers_stalls_no_step(
    make_run: Callable[..., Path], server: BucketServer, straight: str
) -> None:
    run = make_run("stalled", **STEPS, checkpoints=url("stalled"))
    ended = time.monotonic() + 3600

    def stall(number: int) -> None:
        if any("/step-" in request and request.startswith("P") for request in server.requests[:number]):
            while time.monotonic() < ended:
                time.sleep(0.05)

    server.before = stall
    done = train(run, ranks=2)
    ended = 0.0
    assert done.returncode == 0, done.stderr
    assert last_hash(run) == straight
    assert events(run, "upload-failed")
    assert not events(run, "upload")
    seconds = {record["step"]: record["elapsed_seconds"] for record in read_metrics(run) if "train_loss" in record}
    assert seconds[12] - seconds[1] < 10.0  # a hang would be the test's time limit
