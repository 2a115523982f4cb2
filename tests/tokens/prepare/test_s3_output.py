"""S3 output: the token files of a folder, whatever is killed and whichever disks are lost on the way."""

import hashlib
import io
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

from common.errors import BadInput
from tests.conftest import ROOT, shared
from tests.s3_server import BUCKET, S3Server, serve_s3
from tests.tokens.documents.reading import SETTINGS
from tests.tokens.preparing import CRASH, PIPES, PREPARE, files_of, jsonl, run, write
from tests.walks import children, kill
from tokens.prepare import s3_output
from tokens.prepare.commit_log import CommitLog, Entry
from tokens.prepare.growing_files import GrowingStream
from tokens.prepare.plan import UnitPlan
from tokens.prepare.s3_output import S3Output
from tokens.prepare.verify import status, verify

SLOW_POINTS = (
    "tokens written",
    "ledger written",
    "unit deleted",
    "plan uploaded",
    "checkpoint written",
    "shard named",
    "manifest uploaded",
    "leftover deleted",
)  # of a commit, of the bucket and of the end
QUICK_POINTS = ("shard uploaded", "ledger uploaded")
POINTS = [*QUICK_POINTS, *(pytest.param(point, marks=pytest.mark.slow) for point in SLOW_POINTS)]


OPTIONS = ("--tokenizer", "bytes", "--unit-bytes", "1000", "--executor", "inline", "--shard-tokens", "300")


FRACTIONS = ("--validation-fraction", "0.2", "--test-fraction", "0.05")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serve_s3(monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", [f"document {number}" for number in range(200)])


@pytest.fixture(scope="module")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The token files and their manifest as a folder has them."""
    out = tmp_path_factory.mktemp("local") / "out"
    done = run(PREPARE, source, "--output", out, *OPTIONS, *FRACTIONS)
    assert done.returncode == 0, done.stderr
    return files_of(out) | {"manifest.json": digest((out / "manifest.json").read_bytes())}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def objects(s3: S3Server, prefix: str) -> dict[str, str]:
    """Return the sha256 of each object but the plan and the ledger, whose lines follow the commits."""
    found = s3.objects(f"{prefix}/")
    assert {"plan.json", "ledger.jsonl"} < set(found)
    return {name: digest(data) for name, data in found.items() if name not in ("plan.json", "ledger.jsonl")}


def test_a_bucket_gets_the_files_of_a_folder_and_the_disk_is_left_empty(
    s3: S3Server, source: Path, local: dict[str, str], tmp_path: Path
) -> None:
    output = ("--output", f"s3://{BUCKET}/some/tokens", "--scratch", tmp_path / "scratch")
    done = run(PREPARE, source, *output, *OPTIONS, *FRACTIONS)
    assert done.returncode == 0, done.stderr
    assert objects(s3, "some/tokens") == local
    assert not list((tmp_path / "scratch").rglob("*.safetensors"))
    again = run(PREPARE, source, *output, *OPTIONS, *FRACTIONS)
    assert again.returncode == 0
    assert f"s3://{BUCKET}/some/tokens: complete already" in again.stderr
    for name, data in s3.objects("some/tokens/").items():
        (tmp_path / "scratch" / name).write_bytes(data)
    assert "all as written" in run(PREPARE, "verify", tmp_path / "scratch").stdout
    refused = run(PREPARE, source, *output, *OPTIONS, *FRACTIONS)
    assert "finished tokens are no scratch; pass another --scratch" in refused.stderr
    run(CRASH, source, "--output", tmp_path / "mine", *OPTIONS, CRASH_AT="ledger written", CRASH_TIME="1")
    refused = run(PREPARE, source, *output[:2], "--scratch", tmp_path / "mine", *OPTIONS, *FRACTIONS)
    assert "plan.json: another preparation's; pass another --scratch" in refused.stderr


def test_every_crash_point_is_tried() -> None:
    named = set(re.findall(r'reached\("([^"]+)"\)', Path(s3_output.__file__).read_text()))
    assert len(named) > 5
    assert named <= {*QUICK_POINTS, *SLOW_POINTS}


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_moment_and_the_loss_of_the_disk_change_no_object(
    s3: S3Server, source: Path, local: dict[str, str], tmp_path: Path, point: str
) -> None:
    once = point in ("plan uploaded", "ledger uploaded", "manifest uploaded")
    for number, disk in (("1", "lost"), *([] if once else [("4", "kept")])):
        prefix, scratch = f"{point.replace(' ', '-')}-{disk}", tmp_path / disk
        command = (source, "--output", f"s3://{BUCKET}/{prefix}", *OPTIONS, *FRACTIONS)
        killed = run(CRASH, *command, "--scratch", scratch, CRASH_AT=point, CRASH_TIME=number)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if number == "4" and point != "leftover deleted":
            assert ".checkpoint-00000000.safetensors" in s3.objects(f"{prefix}/")
        if disk == "lost":
            shutil.rmtree(scratch)
        done = run(PREPARE, *command, "--scratch", scratch)
        assert done.returncode == 0, done.stderr
        assert objects(s3, prefix) == local


def test_what_the_bucket_holds_is_not_computed_again(s3: S3Server, source: Path, tmp_path: Path) -> None:
    command = (source, "--output", f"s3://{BUCKET}/out", *OPTIONS, *FRACTIONS)
    run(CRASH, *command, "--scratch", tmp_path / "a", CRASH_AT="checkpoint written", CRASH_TIME="3")
    done = run(PREPARE, *command, "--scratch", tmp_path / "b")
    assert "resuming after 4 of" in done.stderr or "resuming after 3 of" in done.stderr, done.stderr


def test_a_bucket_is_looked_at_and_verified_where_it_is(s3: S3Server, source: Path, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/out"
    command = (source, "--output", url, "--scratch", tmp_path / "a", *OPTIONS, *FRACTIONS)
    with pytest.raises(BadInput, match=f"{url}: no plan.json"):
        status(url)
    run(CRASH, *command, CRASH_AT="checkpoint written", CRASH_TIME="3")
    midway = status(url)
    assert f"{url}: not complete, last commit " in midway[0] and "3 of 5 (60.0% of " in midway[1]
    with pytest.raises(BadInput, match=f"{url}: no manifest.json; only a finished preparation has one"):
        verify(url)
    assert run(PREPARE, *command).returncode == 0
    whole = status(url)
    assert f"{url}: complete" in whole[0] and "5 of 5 (100.0% of " in whole[1]
    assert "all as written" in verify(url)[0]
    name = max(name for name in s3.objects("out/") if name.startswith("train-"))
    data = bytearray(s3.objects("out/")[name])
    data[-1] ^= 1
    s3.put(f"out/{name}", bytes(data))
    damaged = run(PREPARE, "verify", url)
    assert damaged.returncode == 1
    assert f"{url}/{name}: damaged: got sha256 " in damaged.stderr
    assert re.search(rf"of train, made from unit 4: {source} \(bytes [\d,]+ to [\d,]+\)$", damaged.stderr.strip())


def test_the_tokenizers_ranks_go_with_the_tokens(s3: S3Server, source: Path, tmp_path: Path) -> None:
    ranks = shared("gpt2.tiktoken")
    options = {"tokenizer": str(ranks), "shard_tokens": 300, "split": "hash", "validation_fraction": 0.2}
    write(tmp_path, source, bucket=f"s3://{BUCKET}/out", **options)
    assert s3.objects("out/")["tokenizer.tiktoken"] == ranks.read_bytes()


@pytest.mark.slow
def test_random_kills_and_lost_disks_change_no_object(s3: S3Server, tmp_path: Path) -> None:
    draw = random.Random(0)
    source = jsonl(tmp_path / "a.jsonl", [" ".join(draw.choices(["some", "words"], k=400)) for _ in range(2000)])
    options = ("--tokenizer", "bytes", "--unit-bytes", "100000", "--shard-tokens", "150000", *FRACTIONS)
    assert run(PREPARE, source, "--output", tmp_path / "local", *options).returncode == 0
    wanted = files_of(tmp_path / "local")
    s3.busy_every = 7
    kills = 0
    while True:
        scratch = tmp_path / f"scratch{kills}"
        more = ["--workers", str(draw.choice([1, 2])), "--scratch", str(scratch), "--output", f"s3://{BUCKET}/out"]
        process = subprocess.Popen([*PREPARE, str(source), *options, *more], cwd=ROOT, **PIPES)
        if kills == 4:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            break
        time.sleep(draw.uniform(1, 3))
        for pid in [process.pid, *children(process)]:
            kill(pid)
        process.communicate(timeout=60)
        if process.returncode == 0:  # it was faster
            break
        kills += 1
        shutil.rmtree(scratch, ignore_errors=True)
    s3.busy_every = 0
    assert kills
    assert {name: sha for name, sha in objects(s3, "out").items() if name.endswith(".safetensors")} == wanted


def test_the_disk_holds_open_shards_only(
    s3: S3Server, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    append = CommitLog.append

    def look(log: CommitLog, *entries: Entry) -> None:
        held.append(len(list(tmp_path.glob(".partial-*"))))
        append(log, *entries)

    monkeypatch.setattr(CommitLog, "append", look)
    options = {"validation_fraction": 0.2, "unit_bytes": 500, "shard_tokens": 300}
    write(tmp_path, source, split="hash", bucket=f"s3://{BUCKET}/out", **options)
    assert len(held) >= 10
    assert max(held) <= 2 + 2  # an open one of each split, and those that a unit has filled


def test_two_machines_do_not_write_the_same_tokens(s3: S3Server, tmp_path: Path) -> None:
    places = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ledger.jsonl").write_text(f"{name}\n")
        places.append(S3Output(f"s3://{BUCKET}/out", tmp_path / name))
    places[0].checkpoint({})
    with pytest.raises(BadInput, match="exists: another process prepares these tokens"):
        places[1].checkpoint({})


def test_checkpoints_at_the_edge_of_a_shard_restore_its_tokens(s3: S3Server, tmp_path: Path) -> None:
    settings = attrs.evolve(SETTINGS, shard_tokens=4)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "ledger.jsonl").write_text("a line\n")
    output = S3Output(f"s3://{BUCKET}/out", tmp_path / "a")
    stream = GrowingStream(tmp_path / "a", "train", settings, to_bucket=True)
    tokens = np.arange(7, dtype=np.uint16)
    for begin, end in ((0, 4), (4, 4), (4, 6), (6, 6), (6, 7)):
        stream.append(io.BytesIO(tokens[begin:end].tobytes()))
        output.checkpoint({"train": stream})
        stream.drop_full_shards()
    S3Output(f"s3://{BUCKET}/out", tmp_path / "b").restore(UnitPlan(settings, (), (), ()))
    restored = GrowingStream(tmp_path / "b", "train", settings, to_bucket=True)
    restored.resume(7, tmp_path / "ledger.jsonl")
    assert restored.read(4, 7).tolist() == [4, 5, 6]
    assert [path.name for path in (tmp_path / "b").glob(".partial*")] == [".partial-train-00001.safetensors"]


def test_the_scratch_of_another_preparation_is_left_alone(s3: S3Server, source: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    assert run(PREPARE, source, "--output", f"s3://{BUCKET}/a", "--scratch", scratch, *OPTIONS).returncode == 0
    killed = run(CRASH, source, "--output", scratch, *OPTIONS, CRASH_AT="ledger written", CRASH_TIME="3")
    assert killed.returncode == -signal.SIGKILL
    refused = run(PREPARE, source, "--output", f"s3://{BUCKET}/b", "--scratch", scratch, *OPTIONS)
    assert "plan.json: another preparation's; pass another --scratch" in refused.stderr
    assert "resuming after 3 of" in run(PREPARE, source, "--output", scratch, *OPTIONS).stderr


def test_a_preparation_that_finds_nothing_leaves_nothing_in_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"content": "text"}\n' * 50)
    command = (source, "--output", f"s3://{BUCKET}/out", "--scratch", tmp_path / "scratch", *OPTIONS)
    assert "none of the 50 documents of the sources could be read" in run(PREPARE, *command).stderr
    assert s3.objects("out/") == {}
    done = run(PREPARE, *command, "--text-field", "content", "--validation-fraction", "0")
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_done_is_one_line(s3: S3Server, source: Path, tmp_path: Path) -> None:
    s3.put("taken/other.txt", b"mine")
    s3.put("lost/plan.json", b"{}")
    for output, more, said in (
        (f"s3://{BUCKET}/a", ("--split", "tail"), "wanted --split hash"),
        ("gs://a/b", (), "wanted a folder, or s3://BUCKET/PREFIX"),
        (f"s3://{BUCKET}/taken", (), f"s3://{BUCKET}/taken/other.txt: exists, and no plan.json; pass another --output"),
        (f"s3://{BUCKET}/lost", (), "plan.json: damaged: "),
        ("s3://absent/a", (), "The specified bucket does not exist"),
        (f"s3://{BUCKET}/b", ("--test-fraction", "0.00001"), "no document's hash fell to test, and the train stream"),
    ):
        done = run(PREPARE, source, "--output", output, "--scratch", tmp_path / output[-4:], *OPTIONS, *more)
        assert done.returncode in (1, 2)
        assert said in done.stderr.splitlines()[-1], done.stderr
    sharded = run(PREPARE, source, "--output", f"s3://{BUCKET}/c", "--tokenizer", "bytes")
    assert "wanted --shard-tokens N" in sharded.stderr


def test_a_missing_checkpoint_is_named(s3: S3Server, source: Path, tmp_path: Path) -> None:
    command = (source, "--output", f"s3://{BUCKET}/out", *OPTIONS, *FRACTIONS)
    run(CRASH, *command, "--scratch", tmp_path / "a", CRASH_AT="checkpoint written", CRASH_TIME="3")
    s3.client().delete_object(Bucket=BUCKET, Key="out/.checkpoint-00000001.safetensors")
    done = run(PREPARE, *command, "--scratch", tmp_path / "b")
    assert f"s3://{BUCKET}/out/.checkpoint-00000001.safetensors: missing, and later ones are there" in done.stderr
