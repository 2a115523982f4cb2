"""A kill at any moment of a preparation changes no byte of the token files, in a folder or in a bucket."""

import hashlib
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.bucket_server import BucketServer
from tests.conftest import shared, slow
from tests.tokens.preparing import COMMAND, CRASH, PREPARE, files_of, kill_again_and_again, run, succeed
from tokens.prepare import bucket_output, token_writer

COMMIT_POINTS = ("tokens written", "ledger written", "unit deleted")
CUT_POINTS = ("tail copied", "cut noted", "tail cut off")
END_POINTS = (*CUT_POINTS, "headers written", "file named", "all named", "manifest written")
QUICK_POINTS = ("shard uploaded", "ledger uploaded")  # points of the bucket's protocol that the quick test tries
BUCKET_POINTS = ("plan uploaded", "checkpoint written", "shard named", "manifest uploaded", "leftover deleted")
SHARDS = ("--shard-tokens", "300")
OPTIONS = ("--tokenizer", "bytes", "--unit-bytes", "1000", "--executor", "inline")
# The hash selects no document for the test split, so that split gets the last document of train.
FRACTIONS = ("--validation-fraction", "0.1", "--test-fraction", "0.001")
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
BUCKET_FRACTIONS = ("--validation-fraction", "0.2", "--test-fraction", "0.05")


@pytest.fixture(scope="module")
def straight(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The files of preparations that were not killed, by their split options."""
    files_by_options = {}
    for options in ("hash", "tail --shard-tokens 300"):
        out = tmp_path_factory.mktemp("straight") / "out"
        succeed(PREPARE, source, *OPTIONS, *FRACTIONS, "--split", *options.split(), "--output", out)
        files_by_options[options] = files_of(out)
    assert len(files_by_options["hash"]) == 3 and len(files_by_options["tail --shard-tokens 300"]) > 5
    return files_by_options


@pytest.fixture(scope="module")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a preparation in a folder, including the manifest. Its options are those of the bucket tests."""
    out = tmp_path_factory.mktemp("local") / "out"
    succeed(PREPARE, source, "--output", out, *OPTIONS, *SHARDS, *BUCKET_FRACTIONS)
    return files_of(out) | {"manifest.json": hashlib.sha256((out / "manifest.json").read_bytes()).hexdigest()}


def in_bucket(server: BucketServer, prefix: str) -> dict[str, str]:
    """Return the sha256 of each object except the plan and the ledger. A kill changes the ledger's lines."""
    objects = server.contents(prefix)
    assert {"plan.json", "ledger.jsonl"} < set(objects)
    hashed = objects.keys() - {"plan.json", "ledger.jsonl"}
    return {name: hashlib.sha256(objects[name]).hexdigest() for name in hashed}


def test_every_crash_point_is_tried() -> None:
    texts = [Path(module.__file__).read_text() for module in (token_writer, bucket_output)]
    named = {point for text in texts for point in re.findall(r'reached\("([^"]+)"\)', text)}
    assert named == {*COMMIT_POINTS, *END_POINTS, *QUICK_POINTS, *BUCKET_POINTS}


@pytest.mark.parametrize("point", [*COMMIT_POINTS, *END_POINTS])
@pytest.mark.parametrize("split", ["hash", *slow("tail --shard-tokens 300")])
def test_a_kill_at_any_moment_changes_no_file(
    source: Path, straight: dict[str, dict[str, str]], tmp_path: Path, point: str, split: str
) -> None:
    command = (source, *OPTIONS, *FRACTIONS, "--split", *split.split(), "--output", tmp_path / "out")
    killed = run(CRASH, *command, CRASH_AT=point, CRASH_TIME="3" if point in COMMIT_POINTS else "1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "out" / "manifest.json").exists() == (point == "manifest written")
    succeed(PREPARE, *command)
    assert files_of(tmp_path / "out") == straight[split]
    remaining_names = {path.name for path in (tmp_path / "out").iterdir()}
    assert remaining_names == {*straight[split], ".lock", "plan.json", "ledger.jsonl", "manifest.json"}


@pytest.mark.parametrize("point", [QUICK_POINTS[0], *slow(QUICK_POINTS[1], *COMMIT_POINTS, *BUCKET_POINTS)])
def test_a_kill_or_a_lost_disk_changes_no_object(
    bucket_server: BucketServer, source: Path, local: dict[str, str], tmp_path: Path, point: str
) -> None:
    once = point in ("plan uploaded", "ledger uploaded", "manifest uploaded")
    for number, disk in (("1", "lost"), *([] if once else [("4", "kept")])):
        prefix, scratch = f"{point.replace(' ', '-')}-{disk}", tmp_path / disk
        command = (source, "--output", f"s3://runs/{prefix}", *OPTIONS, *SHARDS, *BUCKET_FRACTIONS)
        killed = run(CRASH, *command, "--scratch", scratch, CRASH_AT=point, CRASH_TIME=number)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if number == "4" and point != "leftover deleted":
            assert ".checkpoint-00000000.safetensors" in bucket_server.contents(prefix)
        if disk == "lost":
            shutil.rmtree(scratch)
        succeed(PREPARE, *command, "--scratch", scratch)
        assert in_bucket(bucket_server, prefix) == local


@pytest.mark.parametrize("kills", [*slow(3), pytest.param(50, marks=LONG)])
def test_random_kills_change_no_byte(
    cluster: "subprocess.Popen[str]", corpus: Path, tmp_path: Path, kills: int
) -> None:
    assert cluster.stdout is not None
    shards = ("--shard-tokens", "100000", "--split", "tail")
    straight = (corpus, "--output", tmp_path / "straight", "--tokenizer", shared("gpt2.tiktoken"))
    succeed(PREPARE, *straight, *shards, *COMMAND)
    expected_files, address = files_of(tmp_path / "straight"), cluster.stdout.readline().strip()
    assert len(expected_files) > 5
    kill_again_and_again([str(corpus), *shards], tmp_path / "out", expected_files, kills, address)
    assert files_of(tmp_path / "out") == expected_files
