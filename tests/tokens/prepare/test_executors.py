"""Any number of workers or Ray tasks write the same bytes, even if some are killed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.conftest import ROOT, one_line, shared, slow
from tests.tokens.documents.reading import SETTINGS
from tests.tokens.preparing import (
    COMMAND,
    FRACTION,
    PREPARE,
    files_of,
    jsonl,
    ledger_lines,
    run,
    succeed,
    wait_for_lines,
    write,
)
from tests.walks import children, kill
from tokens.documents.inputs import Problems
from tokens.prepare import executors
from tokens.prepare.encode_unit import EncodeJob, Result, Task


@pytest.mark.slow
def test_losing_a_cluster_node_does_not_change_bytes(cluster: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert cluster.stdin is not None and cluster.stdout is not None
    source = jsonl(tmp_path / "a.jsonl", [f"document {number} " * 200 for number in range(20_000)])
    options = ("--tokenizer", "bytes", "--unit-bytes", "400000")
    succeed(PREPARE, source, *options, "--output", tmp_path / "straight")
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
    assert ledger_lines(out) > before  # the node was lost during the preparation
    assert files_of(out) == files_of(tmp_path / "straight")


def test_an_unreachable_cluster_is_one_error_line(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"])
    options = ("--tokenizer", "bytes", "--executor", "ray", "--ray-address", "127.0.0.1:1")
    done = run(PREPARE, source, *options, "--output", tmp_path / "out")
    assert one_line(done).startswith("prepare_data.py: --ray-address 127.0.0.1:1: no cluster answers there:")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_error_in_a_ray_task_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, submit_unit = jsonl(tmp_path / "a.jsonl", ["text"]), executors.RayCluster.submit

    def vanish(cluster: executors.RayCluster, job: EncodeJob, task: Task) -> "Future[Result]":
        source.unlink()  # the plan has been made already
        return submit_unit(cluster, job, task)

    monkeypatch.setattr(executors.RayCluster, "submit", vanish)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # the command must ignore this address
    with pytest.raises(BadInput) as refused:
        write(tmp_path / "out", source, executor="ray")
    assert str(refused.value).startswith(f"{source}: cannot be read: ") and "\n" not in str(refused.value)


def gpt2_command(corpus: Path, out: Path) -> list[str]:
    return [*PREPARE, str(corpus), "--output", str(out), "--tokenizer", str(shared("gpt2.tiktoken"))]


@pytest.mark.parametrize(("workers", "unit_bytes"), [*slow((1, 3_000_000)), (3, 50_000)])
def test_workers_and_unit_size_do_not_change_bytes(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path, workers: int, unit_bytes: int
) -> None:
    options = ("--workers", str(workers), *FRACTION, "--unit-bytes", str(unit_bytes))
    succeed(PREPARE, *gpt2_command(corpus, tmp_path / "out")[2:], *options)
    assert files_of(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_a_killed_worker_is_replaced(corpus: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    command = [*gpt2_command(corpus, tmp_path / "out"), "--workers", "2", *COMMAND]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for_lines(process, tmp_path / "out", 3)
    kill(children(process)[-1])
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert files_of(tmp_path / "out") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("executor", [("--workers", "2"), ("--executor", "inline")])
def test_a_preparation_resumes_after_ctrl_c(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path, executor: tuple[str, str]
) -> None:
    command = gpt2_command(corpus, tmp_path / "out")
    # Obey Ctrl-C as in a terminal; a program that a shell starts in the background would ignore it.
    obey = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command += [*FRACTION, "--unit-bytes", "3000"]
    for _ in range(5):
        obeying = [sys.executable, "-c", obey, *command, *executor]
        process = subprocess.Popen(obeying, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for_lines(process, tmp_path / "out", 3)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends the signal to all processes
        _, errors = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        shutil.rmtree(tmp_path / "out")  # the command finished before the signal
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("prepare_data.py: interrupted; finished work is kept, so rerun")
    succeed(PREPARE, *command[2:])
    assert files_of(tmp_path / "out") == undisturbed


def test_workers_that_keep_dying_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 10)
    monkeypatch.setattr(executors, "RESTARTS", 1)
    monkeypatch.setattr(executors, "_begin_worker", os._exit)
    with pytest.raises(BadInput, match="workers were killed 2 times in a row while units 0 to 0 were computed"):
        write(tmp_path / "out", source, workers=1)


NOTHING: Any = {"parts": {}, "text_bytes": 0, "fast": True, **Problems().summary()}


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON at line 1"), ('{"index": 0}', "damaged: ")])
def test_a_damaged_task_file_is_one_error_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "00000000.task").write_text(content)
    job = EncodeJob(directory=tmp_path, settings=SETTINGS, tokenizer="bytes", recipe=None)
    with pytest.raises(BadInput, match=rf"{tmp_path}/00000000.task: .*{message}.*; rerun the same command"):
        executors._run_stored_task(job, tmp_path / "00000000.task")


class Shuffled(executors.Executor):
    """An executor that finishes units in random order and loses some workers."""

    def __init__(self, window: int, losses: int):
        self.window, self.losses, self.most_ahead, self.done = window, losses, 0, 0
        self._draw = random.Random(0)

    def submit(self, job: EncodeJob, task: Task) -> "Future[Result]":
        self.most_ahead = max(self.most_ahead, task.index - self.done + 1)
        future: Future[Result] = Future()
        if self.losses and task.index % 3 == 2:
            self.losses -= 1
            future.set_exception(BrokenExecutor())
        else:
            result = Result(index=task.index, **NOTHING)
            threading.Timer(self._draw.uniform(0, 0.01), future.set_result, [result]).start()
        return future

    def restart(self) -> None:
        pass


@pytest.mark.parametrize("losses", [0, 4])
def test_results_arrive_in_order_within_the_window(tmp_path: Path, losses: int) -> None:
    executor = Shuffled(window=4, losses=losses)
    job = EncodeJob(directory=tmp_path, settings=SETTINGS, tokenizer="", recipe=None)
    tasks = iter(Task(index=index, extents=(), inputs=()) for index in range(5, 30))
    executor.done = 5
    got = []
    for results in executors.in_order(executor, job, tasks):
        got += [result.index for result in results]
        executor.done = got[-1] + 1
    assert got == list(range(5, 30))
    assert executor.most_ahead <= 4
