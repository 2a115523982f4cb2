"""A Ray cluster computes the same bytes, also when it loses a node."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import ROOT
from tests.tokens.prepare.test_prepare import PREPARE, files_of, jsonl, ledger_lines, run, wait_for_lines, write
from tokens.prepare import executors
from tokens.prepare.encode_unit import EncodeJob, Result, Task


@pytest.fixture
def cluster() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "tests/tokens/prepare/ray_cluster.py"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()  # type: ignore[union-attr]
    process.wait(60)


def test_a_cluster_that_loses_a_node_writes_the_same_bytes(cluster: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert cluster.stdin is not None and cluster.stdout is not None
    source = jsonl(tmp_path / "a.jsonl", [f"document {number} " * 200 for number in range(20_000)])
    options = ("--tokenizer", "bytes", "--unit-bytes", "400000")
    assert run(PREPARE, source, *options, "--output", tmp_path / "straight").returncode == 0
    address = cluster.stdout.readline().strip()
    out = tmp_path / "out"
    command = [*PREPARE, str(source), *options, "--output", str(out), "--executor", "ray", "--ray-address", address]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_lines(process, out, 10)
    cluster.stdin.write("lose a node\n")
    cluster.stdin.flush()
    assert cluster.stdout.readline() == "one node left\n"
    before = ledger_lines(out)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert ledger_lines(out) > before  # it was lost in the middle
    assert files_of(out) == files_of(tmp_path / "straight")


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"])
    options = ("--tokenizer", "bytes", "--executor", "ray", "--ray-address", "127.0.0.1:1")
    done = run(PREPARE, source, *options, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("prepare_data.py: --ray-address 127.0.0.1:1: no cluster answers:")
    assert "Traceback" not in done.stderr


def test_what_a_task_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, kept = jsonl(tmp_path / "a.jsonl", ["text"]), executors.RayCluster.submit

    def vanish(cluster: executors.RayCluster, job: EncodeJob, task: Task) -> "Future[Result]":
        source.unlink()  # after the plan was made
        return kept(cluster, job, task)

    monkeypatch.setattr(executors.RayCluster, "submit", vanish)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # which nobody asked for
    with pytest.raises(BadInput) as refused:
        write(tmp_path / "out", source, make=lambda: executors.RayCluster(None))
    assert str(refused.value).startswith(f"{source}: cannot be read: ") and "\n" not in str(refused.value)
