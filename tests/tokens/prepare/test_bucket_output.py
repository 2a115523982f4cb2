"""Bucket output: token files are the same as in a folder and are verified. They need not all fit on one disk."""

import re
from pathlib import Path

import pytest

from common.bucket import Bucket
from common.errors import BadInput
from tests.bucket_server import BucketServer
from tests.conftest import one_line, shared
from tests.tokens.documents.reading import flipped
from tests.tokens.preparing import CRASH, PREPARE, files_of, run, succeed, write
from tokens.prepare.bucket_output import BucketOutput
from tokens.prepare.commit_log import CommitLog, Entry
from tokens.prepare.verify import status, verify

OPTIONS = ("--tokenizer", "bytes", "--unit-bytes", "1000", "--executor", "inline", "--shard-tokens", "300")
FRACTIONS = ("--validation-fraction", "0.2", "--test-fraction", "0.05")


def test_a_bucket_and_a_folder_get_the_same_files(bucket_server: BucketServer, source: Path, tmp_path: Path) -> None:
    succeed(PREPARE, source, "--output", tmp_path / "local", *OPTIONS, *FRACTIONS)
    output = ("--output", "s3://runs/some/tokens", "--scratch", tmp_path / "scratch")
    succeed(PREPARE, source, *output, *OPTIONS, *FRACTIONS)
    assert not list((tmp_path / "scratch").rglob("*.safetensors"))
    again = succeed(PREPARE, source, *output, *OPTIONS, *FRACTIONS)
    assert "s3://runs/some/tokens: is already complete" in again.stderr
    for name, data in bucket_server.contents("some/tokens").items():
        (tmp_path / "scratch" / name).write_bytes(data)
    assert files_of(tmp_path / "scratch") == files_of(tmp_path / "local")
    assert (tmp_path / "scratch/manifest.json").read_bytes() == (tmp_path / "local/manifest.json").read_bytes()
    assert "all unchanged" in run(PREPARE, "verify", tmp_path / "scratch").stdout


@pytest.mark.slow
def test_a_bucket_is_resumed_and_verified_in_place(bucket_server: BucketServer, source: Path, tmp_path: Path) -> None:
    url = "s3://runs/looked-at"
    bucket, command = Bucket(url), (source, "--output", url, *OPTIONS, *FRACTIONS)
    with pytest.raises(BadInput, match=f"{url}: has no plan.json"):
        status(url)
    run(CRASH, *command, "--scratch", tmp_path / "a", CRASH_AT="checkpoint written", CRASH_TIME="3")
    midway = status(url)
    assert f"{url}: not complete, last commit " in midway[0] and "3 of 5 (60.0% of " in midway[1]
    with pytest.raises(BadInput, match=f"{url}: has no manifest.json; only a finished preparation has one"):
        verify(url)
    checkpoint = bucket.read(".checkpoint-00000001.safetensors").content
    bucket.delete([".checkpoint-00000001.safetensors"])
    missing = run(PREPARE, *command, "--scratch", tmp_path / "b")
    assert (
        f"{url}/.checkpoint-00000001.safetensors: missing, although later files exist; use a new --output"
        in missing.stderr
    )
    bucket.write(".checkpoint-00000001.safetensors", checkpoint)
    done = run(PREPARE, *command, "--scratch", tmp_path / "b")
    assert "resuming after 4 of" in done.stderr or "resuming after 3 of" in done.stderr, done.stderr
    final_status = status(url)
    assert f"{url}: complete" in final_status[0] and "5 of 5 (100.0% of " in final_status[1]
    assert "all unchanged" in verify(url)[0]
    name = max(name for name in bucket.objects() if name.startswith("train-"))
    data = bucket.read(name).content
    bucket.write(name, flipped(data, len(data) - 1))
    damaged = one_line(run(PREPARE, "verify", url))
    assert f"{url}/{name}: damaged: got sha256 " in damaged
    assert re.search(rf"of train, made from unit 4: {source} \(bytes [\d,]+ to [\d,]+\)$", damaged)


def test_the_disk_contains_only_unfinished_shards(
    bucket_server: BucketServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_counts = []
    append = CommitLog.append

    def look(log: CommitLog, *entries: Entry) -> None:
        shard_counts.append(len(list(tmp_path.glob(".scratch/.partial-*"))))
        append(log, *entries)

    monkeypatch.setattr(CommitLog, "append", look)
    ranks = shared("gpt2.tiktoken")
    options = {"tokenizer": str(ranks), "validation_fraction": 0.2, "unit_bytes": 500, "shard_tokens": 100}
    write(tmp_path, source, split="hash", bucket="s3://runs/held", **options)
    assert len(shard_counts) >= 10
    assert max(shard_counts) <= 2 + 2  # one unfinished shard of each split, and the shards that a unit has filled
    assert bucket_server.contents("held")["tokenizer.tiktoken"] == ranks.read_bytes()


def test_the_original_survives_an_incomplete_copy(
    bucket_server: BucketServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "copy", lambda bucket, _, final: bucket.write(final, b"short"))
    with pytest.raises(BadInput, match=r"/train.*\.safetensors: got 5 bytes, wanted [\d,]+ as in \.partial-.*; rerun"):
        write(tmp_path, source, split="hash", bucket="s3://runs/short", shard_tokens=300)
    assert ".partial-train-00000.safetensors" in bucket_server.contents("short")


@pytest.mark.usefixtures("bucket_server")
def test_two_machines_cannot_write_the_same_tokens(tmp_path: Path) -> None:
    places = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ledger.jsonl").write_text(f"{name}\n")
        places.append(BucketOutput("s3://runs/two", tmp_path / name))
    places[0].checkpoint({})
    with pytest.raises(BadInput, match="already exists: another process is preparing these tokens"):
        places[1].checkpoint({})


def test_a_preparation_without_documents_leaves_no_object(bucket_server: BucketServer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"content": "text"}\n' * 50)
    command = (source, "--output", "s3://runs/nothing", "--scratch", tmp_path / "scratch", *OPTIONS)
    assert "all documents in the sources are unreadable (50)" in run(PREPARE, *command).stderr
    assert bucket_server.contents("nothing") == {}
    succeed(PREPARE, *command, "--text-field", "content", "--validation-fraction", "0")


@pytest.mark.usefixtures("bucket_server")
@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        (
            "s3://runs/taken",
            OPTIONS,
            "s3://runs/taken/other.txt: exists, but there is no plan.json; pass another --output",
        ),
        ("s3://runs/lost", OPTIONS, "plan.json: damaged: "),
        ("s3://absent/a", OPTIONS, "s3://absent/a: cannot be listed: "),
        (
            "s3://runs/b",
            (*OPTIONS, "--test-fraction", "0.00001"),
            "the hash selected no document for test; pass another",
        ),
    ],
)
def test_an_impossible_bucket_output_is_one_error_line(
    source: Path, tmp_path: Path, output: str, options: tuple[str, ...], message: str
) -> None:
    Bucket("s3://runs/taken").write("other.txt", b"mine")
    Bucket("s3://runs/lost").write("plan.json", b"{}")
    done = run(PREPARE, source, "--output", output, "--scratch", tmp_path / "scratch", *options)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.usefixtures("bucket_server")
def test_scratch_files_do_not_touch_another_preparation(source: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"unit_bytes": 1000, "shard_tokens": 300, "split": "hash"}
    write(out, source, validation_fraction=0.3, unit_bytes=1000)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    write(out, source, bucket="s3://runs/other", validation_fraction=0.2, **options)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
