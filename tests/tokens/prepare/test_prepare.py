"""Token files hold exactly the documents, whoever computed them and whatever was killed, and are never half there."""

import base64
import gzip
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from common.errors import BadInput
from tests import launch
from tests.conftest import ROOT, shared
from tests.tokens.tokenizer.test_tokenizer import reference
from tests.walks import children, kill
from tokens.format.splits import SplitRule
from tokens.prepare import executors
from tokens.prepare import prepare as prepare_module
from tokens.prepare import verify as audit
from tokens.prepare.commit_log import LEDGER, CommitLog
from tokens.prepare.encode_unit import EncodeJob, Result, Task
from tokens.prepare.executors import Executor, Inline, Processes
from tokens.prepare.prepare import Host, PrepareRequest, prepare
from tokens.prepare.writer import CRASH_POINTS
from tokens.tokenizer.tokenizer import ByteTokenizer, fingerprint, load_tokenizer

PREPARE = [sys.executable, "prepare_data.py"]
CRASH = [sys.executable, "tests/tokens/prepare/crash.py"]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def write(
    directory: Path, source: Path, *, workers: int = 0, make: Callable[[], Executor] | None = None, **changes: Any
) -> dict[str, Any]:
    """Prepare the bytes of a source, in this process, with workers or with another executor; return the manifest."""
    rule = {"kind": "tail", "seed": 0, "validation": 0.0, "test": 0.0}
    request = {
        "sources": [str(source)],
        "directory": directory,
        "tokenizer": "bytes",
        "text_field": "text",
        "rule": SplitRule(**rule | {key: changes.pop(key) for key in list(changes) if key in rule}),
        "unit_bytes": 1 << 24,
        "shard_tokens": None,
        "bucket": None,
        "fail_on_bad_document": False,
    }
    make = make or ((lambda: Processes(workers)) if workers else Inline)
    host = Host(make_executor=make, say=lambda line: None, show=lambda progress: None)
    return prepare(PrepareRequest(**request | changes), host)


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokens_of(directory: Path, split: str) -> list[int]:
    tensors = load_file(directory / f"{split}.safetensors")  # the stock reader
    assert list(tensors) == ["tokens"]
    assert tensors["tokens"].dtype == np.uint16
    return tensors["tokens"].tolist()


def texts_of(directory: Path, split: str) -> list[str]:
    path = directory / f"{split}.safetensors"
    ids = tokens_of(directory, split) if path.exists() else []
    return "".join("\0" if token == 256 else chr(token) for token in ids).split("\0")[:-1]


def files_of(directory: Path) -> dict[str, str]:
    """Return the sha256 of each token file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")}


def run(command: list[str], *options: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; prepare_data.py, or what is made of it, by tests/launch.py."""
    if command in (PREPARE, CRASH) and "PYTHONPATH" not in environment:  # packages that are there have been imported
        return launch.run(ROOT / command[1], *map(str, options), environment=environment)
    return subprocess.run(
        [*command, *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )


def test_documents_are_joined_by_the_end_of_text_id(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "", "c"]))
    assert tokens_of(tmp_path / "out", "train") == [97, 98, 256, 256, 99, 256]
    assert not (tmp_path / "out" / "validation.safetensors").exists()


@pytest.mark.parametrize("unit_bytes", [30, 1 << 24])
def test_the_last_documents_are_validation_and_test(tmp_path: Path, unit_bytes: int) -> None:
    source = jsonl(tmp_path / "a.jsonl", [str(number) for number in range(10)])
    write(tmp_path / "out", source, validation=0.2, test=0.1, unit_bytes=unit_bytes)
    splits = {split: "".join(texts_of(tmp_path / "out", split)) for split in ("train", "validation", "test")}
    assert splits == {"train": "0123456", "validation": "78", "test": "9"}


def test_a_lone_document_is_cut_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    for kind in ("tail", "hash"):
        write(tmp_path / kind, tmp_path / "a.txt", kind=kind, validation=0.1, test=0.05)
        lengths = [len(tokens_of(tmp_path / kind, split)) for split in ("train", "validation", "test")]
        assert lengths == [85, 10, 5]


def test_a_documents_hash_alone_decides_its_split(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2000)]
    rule = {"kind": "hash", "validation": 0.05, "test": 0.02}
    write(tmp_path / "first", jsonl(tmp_path / "a.jsonl", texts), **rule)
    others = [f"other {number}" for number in range(500)]
    shuffled = random.Random(0).sample(texts + others + texts[:300], len(texts) + len(others) + 300)
    write(tmp_path / "second", jsonl(tmp_path / "b.jsonl", shuffled), unit_bytes=999, **rule)
    for split, share in (("train", 0.93), ("validation", 0.05), ("test", 0.02)):
        first, second = (texts_of(tmp_path / name, split) for name in ("first", "second"))
        assert len(first) == pytest.approx(share * len(texts), rel=0.4)
        assert {text for text in second if text in set(texts)} == set(first)
    write(tmp_path / "third", tmp_path / "a.jsonl", seed=1, **rule)
    assert texts_of(tmp_path / "third", "validation") != texts_of(tmp_path / "first", "validation")


def test_a_split_that_no_hash_falls_to_gets_the_last_documents(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", list("abcdefgh")), kind="hash", validation=0.001)
    assert "".join(texts_of(tmp_path / "out", "train")) == "abcdefg"
    assert texts_of(tmp_path / "out", "validation") == ["h"]


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    manifest = write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "ö"]), validation=0.5)
    kept = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert kept == {"format": 1, **manifest}
    assert manifest["documents"] == 2
    assert manifest["tokens"] == 6
    assert manifest["text_bytes"] == 4
    assert manifest["tokenizer"] == {
        "name": "bytes",
        "vocabulary_size": 257,
        "end_of_text_id": 256,
        "ranks_file": None,
        "fingerprint": fingerprint(load_tokenizer("bytes")),
    }
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["size_bytes"] == len(data)
        assert entry["max_id"] == 256
        assert entry["tokens"] == len(tokens_of(tmp_path / "out", name.removesuffix(".safetensors")))


def test_too_few_documents_and_none_are_refused(tmp_path: Path) -> None:
    two = jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(BadInput, match="2 documents are too few to hold out 1 for validation and 1 for test"):
        write(tmp_path / "out", two, validation=0.1, test=0.1)
    with pytest.raises(BadInput, match="the sources hold no document"):
        write(tmp_path / "none", jsonl(tmp_path / "b.jsonl", []))
    assert not list(tmp_path.rglob("[!.]*.safetensors"))


def test_documents_that_all_fall_to_a_held_out_split_leave_room_for_the_command_that_is_advised(tmp_path: Path) -> None:
    source, fractions = jsonl(tmp_path / "a.jsonl", ["a", "b", "c"]), {"validation": 0.999}
    with pytest.raises(
        BadInput, match=r"every document's hash fell to a held-out split; .* or pass --split tail; nothing"
    ):
        write(tmp_path / "out", source, kind="hash", **fractions)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    write(tmp_path / "out", source, kind="tail", validation=0.3)
    assert texts_of(tmp_path / "out", "train") == ["a", "b"]


@pytest.mark.parametrize("name", ["plan.json", "ledger.jsonl"])
@pytest.mark.parametrize(
    "content", [b'{"a": ' * 100_000, b"[1]", b"\xff", b'{"cut": 3}', b'{"parts": {"train": {"tokens": "5"}}}', b"{}"]
)
def test_a_damaged_plan_or_ledger_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", ["text"] * 20), tmp_path / "out"
    write(out, source)
    path = out / name
    path.write_bytes((path.read_bytes() if name == "ledger.jsonl" else b"") + content + b"\n")
    with pytest.raises(BadInput, match=rf"{name}: damaged: "):
        audit.status(str(out))


def test_an_output_that_cannot_be_is_one_line_that_promises_nothing(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    for output, said in (
        ("/dev/null", "/dev/null: is no folder; pass another --output"),
        (source / "out", "cannot be written: Not a directory; a file stands where a folder is wanted"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long; choose a shorter name"),
    ):
        done = run(PREPARE, source, "--output", output, "--tokenizer", "bytes")
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert said in done.stderr and "kept" not in done.stderr


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "docs\x1b[2J\udcff"
    folder.mkdir()
    jsonl(folder / "a\x1b]0;title\x07.jsonl", ["text"] * 20 + [None])  # type: ignore[list-item]
    (folder / "other\x1b[8m.png").write_text("")
    for output in (folder / "out", folder / "out"):  # the second time: complete already
        done = run(PREPARE, folder, "--output", output, "--tokenizer", "bytes", "--executor", "inline")
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        shown = done.stdout + done.stderr
        assert "\\x1b[2J" in shown and not {character for character in shown if not character.isprintable()} - {"\n"}
    long = run(PREPARE, "x" * 300, "--output", tmp_path / "long", "--tokenizer", "bytes")
    assert "cannot be read: " in long.stderr and len(long.stderr.splitlines()) == 1


def test_existing_tokens_are_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["kept"]))
    for name in ("plan.json", "ledger.jsonl", "manifest.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(BadInput, match=r"train\.safetensors: exists; pass another --output"):
        write(tmp_path / "out", jsonl(tmp_path / "b.jsonl", ["other"]))
    assert texts_of(tmp_path / "out", "train") == ["kept"]


def test_another_command_does_not_go_on_with_these_tokens(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    write(tmp_path / "out", source, validation=0.3)
    before = files_of(tmp_path / "out")
    write(tmp_path / "out", source, validation=0.3)  # complete already
    for change, message in (
        ({"validation": 0.4}, "validation_fraction: got 0.4, wanted 0.3"),
        ({"text_field": "body"}, "text_field: got body, wanted text"),
        ({"unit_bytes": 1000}, "unit_bytes: got 1000"),
    ):
        with pytest.raises(BadInput, match=message):
            write(tmp_path / "out", source, **{"validation": 0.3} | change)
    with pytest.raises(BadInput, match=r"a\.jsonl is not among the sources any more"):
        write(tmp_path / "out", jsonl(tmp_path / "b.jsonl", ["x"]), validation=0.3)
    jsonl(source, ["a", "b", "d"])
    with pytest.raises(BadInput, match=r"a\.jsonl: changed since these tokens were begun"):
        write(tmp_path / "out", source, validation=0.3)
    assert files_of(tmp_path / "out") == before


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text in every format, some 4 MB."""
    folder = tmp_path_factory.mktemp("corpus")
    text = shared("wikitext2.txt").read_text() + shared("tinyshakespeare.txt").read_text()
    draw = random.Random(0)
    texts, at = [], 0
    while at < len(text):
        length = draw.choice([1, 30, 300, 3000, 20_000])
        texts.append(text[at : at + length])
        at += length
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=50)
    jsonl(folder / "b.jsonl", texts[: len(texts) // 2])
    (folder / "c.txt").write_text(text[:500_000])
    (folder / "d.txt").write_text("")
    return folder


PIPES: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
COMMAND = ("--validation-fraction", "0.02", "--unit-bytes", "100000")


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a preparation that was left in peace, by split."""
    directory = tmp_path_factory.mktemp("undisturbed")
    ranks = shared("gpt2.tiktoken")
    done = run(PREPARE, corpus, "--output", directory, "--tokenizer", ranks, "--executor", "inline", *COMMAND)
    assert done.returncode == 0, done.stderr
    return files_of(directory)


def test_gpt2_tokens_are_tiktokens_and_carry_their_ranks(corpus: Path, tmp_path: Path) -> None:
    ranks, out = shared("gpt2.tiktoken"), tmp_path / "out"
    text = (corpus / "c.txt").read_text()
    done = run(PREPARE, corpus / "c.txt", "--output", out, "--tokenizer", ranks, *COMMAND)
    assert done.returncode == 0, done.stderr
    assert tokens_of(out, "train") + tokens_of(out, "validation") == [*reference().encode_ordinary(text), 50256]
    assert (out / "tokenizer.tiktoken").read_bytes() == ranks.read_bytes()
    tokenizer = json.loads((out / "manifest.json").read_text())["tokenizer"]
    assert tokenizer["ranks_sha256"] == hashlib.sha256(ranks.read_bytes()).hexdigest()
    assert f"{out}: 1 documents, " in done.stdout


@pytest.mark.parametrize(("workers", "unit_bytes"), [(1, 3_000_000), (3, 50_000)])
def test_any_number_of_workers_and_any_unit_writes_the_same_bytes(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path, workers: int, unit_bytes: int
) -> None:
    options = ("--workers", str(workers), "--unit-bytes", str(unit_bytes), "--validation-fraction", "0.02")
    done = run(PREPARE, corpus, "--output", tmp_path / "out", "--tokenizer", shared("gpt2.tiktoken"), *options)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("split", ["hash", "tail", "hash --shard-tokens 300", "tail --shard-tokens 300"])
def test_a_kill_at_any_moment_of_a_commit_changes_nothing(tmp_path: Path, point: str, split: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    options = ("--tokenizer", "bytes", "--unit-bytes", "1000", "--executor", "inline", "--split", *split.split())
    fractions = ("--validation-fraction", "0.1", "--test-fraction", "0.0001")  # no hash falls to test: cut off as well
    command = (source, *options, *fractions)
    assert run(PREPARE, *command, "--output", tmp_path / "straight").returncode == 0
    wanted = files_of(tmp_path / "straight")
    assert len(wanted) == 3 if "shard" not in split else len(wanted) > 5
    for number in ("1", "3") if point in CRASH_POINTS[:3] else ("1",):
        out = tmp_path / f"out{number}"
        killed = run(CRASH, *command, "--output", out, CRASH_AT=point, CRASH_TIME=number)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if point != "manifest written":
            assert not (out / "manifest.json").exists()
        done = run(PREPARE, *command, "--output", out)
        assert done.returncode == 0, done.stderr
        assert files_of(out) == wanted
        left = {path.name for path in out.iterdir()} - {".lock", "plan.json", "ledger.jsonl", "manifest.json"}
        assert left == set(wanted)


def test_random_kills_of_anything_under_changing_workers_change_nothing(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    log = kill_again_and_again([str(corpus)], tmp_path / "out", undisturbed, kills=6)
    assert len(log) == 6
    assert files_of(tmp_path / "out") == undisturbed


def test_random_kills_change_no_shard(corpus: Path, tmp_path: Path) -> None:
    shards = ("--shard-tokens", "100000")
    command = (corpus, "--output", tmp_path / "straight", "--tokenizer", shared("gpt2.tiktoken"), *shards, *COMMAND)
    assert run(PREPARE, *command, "--unit-bytes", "20000", "--split", "tail").returncode == 0
    wanted = files_of(tmp_path / "straight")
    assert len(wanted) > 5
    kill_again_and_again([str(corpus), *shards, "--split", "tail"], tmp_path / "out", wanted, kills=3)
    assert files_of(tmp_path / "out") == wanted


def kill_again_and_again(
    sources: list[str], out: Path, wanted: dict[str, str], kills: int, ray_address: str | None = None
) -> list[str]:
    """Kill preparations into `out` until enough kills have hit, then let the last one end; return a log."""
    draw, log = random.Random(kills), []
    ways = [*(("--workers", number) for number in "112233"), ("--executor", "inline")]
    ways += [("--executor", "ray", "--ray-address", ray_address)] if ray_address else []
    while True:
        options = draw.choice(ways)
        command = [*PREPARE, *sources, "--output", str(out), "--tokenizer", str(shared("gpt2.tiktoken")), *options]
        before = ledger_lines(out)
        process = subprocess.Popen([*command, *COMMAND, "--unit-bytes", "20000"], cwd=ROOT, **PIPES)
        if len(log) == kills:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            return log
        wait_for_lines(process, out, before + draw.randint(0, 12))  # 0: while it starts
        time.sleep(draw.uniform(0, 0.1))
        victims = draw.choice(["a worker", "the coordinator", "everything"])
        workers_now = children(process)
        chosen = [draw.choice(workers_now)] if victims == "a worker" and workers_now else [process.pid]
        for pid in [*chosen, *(workers_now if victims == "everything" else [])]:
            kill(pid)
        if victims == "a worker":  # it goes on by itself; then the coordinator goes, too
            time.sleep(draw.uniform(0, 1))
            kill(process.pid)
        process.communicate(timeout=60)  # its workers, which have its pipes, end by themselves
        if process.returncode == 0:  # it was faster
            assert files_of(out) == wanted
            shutil.rmtree(out)
            continue
        after = f"from {before} to {ledger_lines(out)} ledger lines"
        log.append(f"{len(log) + 1:3}  {' '.join(options[:2]):18} kill -9 {victims:15} {after}")
        print(log[-1], flush=True)


def ledger_lines(directory: Path) -> int:
    ledger = directory / "ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def wait_for_lines(process: "subprocess.Popen[str]", directory: Path, wanted: int) -> None:
    """Wait until a ledger is so long, or its process ends."""
    deadline = time.monotonic() + 60
    while ledger_lines(directory) < wanted and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_worker_is_replaced(corpus: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    command = [*PREPARE, str(corpus), "--output", str(tmp_path / "out"), "--tokenizer", str(shared("gpt2.tiktoken"))]
    process = subprocess.Popen([*command, "--workers", "2", *COMMAND], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for_lines(process, tmp_path / "out", 3)
    kill(children(process)[-1])
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert files_of(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("executor", [("--workers", "2"), ("--executor", "inline")])
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path, executor: tuple[str, str]
) -> None:
    command = [*PREPARE, str(corpus), "--output", str(tmp_path / "out"), "--tokenizer", str(shared("gpt2.tiktoken"))]
    # As from a terminal: what a shell starts in the background ignores Ctrl-C.
    obeying = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    command += [*COMMAND, "--unit-bytes", "3000"]
    for _ in range(5):
        process = subprocess.Popen(
            [*obeying, *command, *executor], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        wait_for_lines(process, tmp_path / "out", 3)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
        _, errors = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        shutil.rmtree(tmp_path / "out")  # it was faster
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("prepare_data.py: interrupted; what was committed is kept")
    assert run(PREPARE, *command[2:]).returncode == 0
    assert files_of(tmp_path / "out") == undisturbed


def test_no_pickle_lies_in_the_output_folder_and_a_task_that_others_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(100)])
    submit, written = Processes.submit, []

    def submit_changed(self: Processes, job: EncodeJob, task: Task) -> "Future[Result]":
        future = submit(self, job, task)
        [path] = [path for path in job.directory.iterdir() if path.suffix == ".task"]
        written.append(json.loads(path.read_text()))  # plain data
        path.write_bytes(pickle.dumps(task))
        return future

    class Slow(Processes):  # no worker takes a task before it was changed
        def __init__(self, workers: int) -> None:
            super().__init__(workers)
            self._pool.submit(time.sleep, 0.5)

    monkeypatch.setattr(Processes, "submit", submit_changed)
    with pytest.raises(BadInput, match=r"00000000\.task: changed by another process"):
        write(tmp_path / "out", source, make=lambda: Slow(1))
    assert written[0]["inputs"][0]["path"] == str(source)


@pytest.mark.parametrize("name", [".partial-train.safetensors", ".lock", ".units", "tokenizer.tiktoken"])
def test_nothing_is_written_through_links_in_the_output_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 100)
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    if name == ".units":
        victim.mkdir()
    else:
        victim.write_text("precious")
    begin = prepare_module.make_plan

    def plant(*arguments: Any) -> Any:
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(victim)
        return begin(*arguments)

    monkeypatch.setattr(prepare_module, "make_plan", plant)  # after leftovers of an earlier command were deleted
    if name == ".lock":
        (tmp_path / "out" / name).symlink_to(victim)
    write(tmp_path / "out", source, tokenizer=str(byte_ranks(tmp_path)))
    assert not list(victim.iterdir()) if name == ".units" else victim.read_text() == "precious"
    assert texts_of(tmp_path / "out", "train") == ["text"] * 100


def byte_ranks(directory: Path) -> Path:
    """Write byte-pair ranks that merge nothing: ids are bytes."""
    path = directory / "bytes.tiktoken"
    path.write_text("".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))
    return path


def test_workers_that_die_again_and_again_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 10)
    monkeypatch.setattr(executors, "RESTARTS", 1)
    monkeypatch.setattr(executors, "_begin_worker", os._exit)
    with pytest.raises(BadInput, match="workers were killed 2 times in a row while units 0 to 0 were computed"):
        write(tmp_path / "out", source, workers=1)


def test_bad_documents_are_told_and_too_many_are_an_error(tmp_path: Path) -> None:
    for bad, status in ((1, 0), (5, 1)):
        source = jsonl(tmp_path / f"{bad}.jsonl", ["text"] * 200 + [None] * bad)  # type: ignore[list-item]
        done = run(PREPARE, source, "--output", tmp_path / f"out{bad}", "--tokenizer", "bytes")
        assert done.returncode == status
        assert f"bad documents: {bad} null text; {bad} documents and 0 bytes of input are left out:" in done.stderr
        assert f"{source}: byte 3400: null text: got NoneType, wanted a string" in done.stderr
        assert (tmp_path / f"out{bad}" / "manifest.json").exists()
    with source.open("a") as file:
        file.write('{"text": "\\ud800"}\n')  # which is mended, and no loss
    options = ("--tokenizer", "bytes", "--on-bad-document", "fail")
    done = run(PREPARE, source, "--output", tmp_path / "fail", *options)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"prepare_data.py: {source}: byte 3400: null text: got NoneType")
    assert not list((tmp_path / "fail").glob("[!.]*.safetensors"))


def test_what_an_encoder_cannot_do_names_the_unit_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):  # what Rust's panics are to Python
        pass

    (tmp_path / "b.txt").write_text("boom")
    encode = ByteTokenizer.encode
    for error in (PanicException("stack overflow\nmore"), ValueError("Regex error")):

        def fail(tokenizer: ByteTokenizer, text: str, error: BaseException = error) -> np.ndarray:
            if text == "boom":
                raise error
            return encode(tokenizer, text)

        monkeypatch.setattr(ByteTokenizer, "encode", fail)
        message = re.escape(f"unit 0, made from {tmp_path}/b.txt: cannot be encoded: {str(error).splitlines()[0]}; ")
        with pytest.raises(BadInput, match=message):
            write(tmp_path / "out", tmp_path / "b.txt")


def test_a_damaged_file_is_an_error_however_small(tmp_path: Path) -> None:
    whole = jsonl(tmp_path / "whole.jsonl", ["text " * 100] * 1000)
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-9])
    jsonl(tmp_path / "nulls.jsonl", [None] * 5)  # type: ignore[list-item]
    done = run(PREPARE, tmp_path, "--output", tmp_path / "out", "--tokenizer", "bytes")
    assert done.returncode == 1
    assert f"{damaged}: " in done.stderr and "damaged file" in done.stderr  # however many others there are
    assert "in damaged files could not be read; the token files are complete without" in done.stderr
    assert whole.name not in done.stderr


def test_sources_without_a_readable_document_leave_nothing_behind(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"content": "text"}\n' * 50)
    command = (source, "--output", out, "--tokenizer", "bytes")
    refused = run(PREPARE, *command)
    assert refused.returncode == 1
    said = f"none of the 50 documents of the sources could be read: {source}: byte 0: no text field: no 'text'; it has"
    assert said in refused.stderr.splitlines()[-1] and "nothing was written" in refused.stderr
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert run(PREPARE, *command, "--text-field", "content").returncode == 0


def test_finished_tokens_that_are_gone_are_not_called_complete(tmp_path: Path) -> None:
    command = (jsonl(tmp_path / "a.jsonl", ["text"] * 20), "--output", tmp_path / "out", "--tokenizer", "bytes")
    assert run(PREPARE, *command).returncode == 0
    assert "complete already" in run(PREPARE, *command).stderr
    (tmp_path / "out" / "train.safetensors").unlink()
    gone = run(PREPARE, *command)
    assert gone.returncode == 1 and "train.safetensors: missing, but manifest.json lists it" in gone.stderr
    (tmp_path / "out" / "manifest.json").write_text("{")
    assert "manifest.json: damaged: not JSON" in run(PREPARE, *command).stderr


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text " * 1000] * 100)
    options = (source, "--output", tmp_path / "out", "--tokenizer", "bytes", "--unit-bytes", "50000")
    full = run(["prlimit", "--fsize=300000", *PREPARE], *options, "--executor", "inline")
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    assert "File too large; what was committed is kept: the same command goes on" in full.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").glob("[!.]*.safetensors"))
    full = run(["prlimit", "--fsize=300000", *PREPARE], *options, "--workers", "2")  # now a worker may be the first
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    assert "File too large; what was committed is kept" in full.stderr.splitlines()[-1]
    done = run(PREPARE, *options)
    assert done.returncode == 0
    assert re.search(r"going on after 2 of 10 units", done.stderr), done.stderr
    assert sum(len(texts_of(tmp_path / "out", split)) for split in ("train", "validation")) == 100


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (8, 64):
        source = tmp_path / f"{megabytes}.txt"
        with source.open("w") as file:
            for number in range(megabytes * 1024):
                file.write(f"line {number:<8}" + "of a file that is one document " * 33 + "\n")
        code = (
            "import resource, sys; sys.argv[0] = 'prepare_data.py'; import prepare_data; status = prepare_data.main(); "
            "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(status)"
        )
        command = [sys.executable, "-c", code]
        options = ("--output", tmp_path / f"out{megabytes}", "--tokenizer", "bytes", "--executor", "inline")
        peaks.append(int(run(command, source, *options).stdout.split("peak ")[1]))
    assert peaks[1] < peaks[0] + 20, f"peak MiB for 8 and 64 MiB of input: {peaks}"


def test_two_commands_do_not_prepare_the_same_tokens_at_once(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    from tokens.prepare.prepare import _lock

    (tmp_path / "out").mkdir()
    with _lock(tmp_path / "out"), pytest.raises(BadInput, match="another process prepares these tokens"):
        write(tmp_path / "out", source)
    write(tmp_path / "out", source)


def test_a_pipe_in_the_place_of_the_ledger_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LEDGER)
    with pytest.raises(BadInput, match=r"ledger\.jsonl: cannot be read: is a pipe, wanted a regular file"):
        CommitLog(tmp_path, "a plan")


@pytest.mark.parametrize(
    ("name", "says"),
    [(".lock", "cannot be written: .*pipe or a device: move that away"), (".scratch", "cannot be read: is a pipe")],
)
def test_a_pipe_in_an_output_folder_is_not_waited_for(tmp_path: Path, name: str, says: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(BadInput, match=rf"{name}: {says}"):
        write(tmp_path / "out", source)


@pytest.mark.parametrize("name", ["manifest.json", "ledger.jsonl"])
def test_status_does_not_take_a_loop_of_links_for_a_missing_file(tmp_path: Path, name: str) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["text"] * 20))
    (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / name).symlink_to(name)
    with pytest.raises(BadInput, match=name):
        audit.status(str(tmp_path / "out"))
