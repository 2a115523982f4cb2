"""Batch-size search: it notices if a rank runs out of memory, does not hang, and does not damage train.json."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from common.errors import BadInput
from tests import launch
from tests.conftest import ROOT, MakeRun, one_line, only_line, slow
from training.config.train_config import load_run
from training.planning import batch_finder as finder
from training.planning.batch_probe import HEADROOM, Prober, Report, usable_bytes
from training.planning.memory_model import GIB, MemoryModel, outside_bytes

SHORT = Path(__file__).with_name("short_of_memory.py")


HANG_SECONDS = 180  # a search in these tests takes 5 s


def find(run: Path, *options: str, script: Path = ROOT / "find_batch_size.py", **environment: str) -> Any:
    return launch.run(script, str(run), *options, environment=environment)


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir()}


@pytest.mark.parametrize(
    ("place", "parallel", "fits"),
    [
        *slow(("forward", "ddp", 2), ("backward", "ddp", 2), ("step", "fsdp", 2)),
        *(("backward", "fsdp", 2), ("later", "ddp", 1)),
    ],
)
def test_search_notices_a_rank_out_of_memory(make_run: MakeRun, place: str, parallel: str, fits: int) -> None:
    run = make_run(parallel=parallel, determinism="off", dataset="not needed")
    before = contents(run)
    options = ("--device", "cpu", "--world-size", "2")
    done = find(run, *options, script=SHORT, FAIL_IN=place, ABOVE=str(fits))
    assert done.returncode == 0, done.stderr
    assert "does not fit on rank 1: CUDA out of memory" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"largest micro-batch that fits and keeps the global batch: {fits} (8 = {fits} x"), last
    assert contents(run) == before


def test_search_under_torchrun_writes_train_json(make_run: MakeRun) -> None:
    run = make_run(determinism="off")
    text = (run / "train.json").read_text().replace(": ", " :  ", 3) + "\n\n"
    (run / "train.json").write_text(text)
    environment = {"FAIL_IN": "backward", "ABOVE": "1"}
    done = launch.run(SHORT, str(run), "--device", "cpu", "--write", ranks=2, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("does not fit on rank 1") == 1
    new_text = (run / "train.json").read_text()
    assert new_text == text.replace('"microbatch_size" :  2', '"microbatch_size" :  1') != text
    assert {path.name for path in run.iterdir()} == {"model.json", "train.json"}


def test_ranks_can_be_killed_right_after_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    prober = Prober([str(SHORT)], 2)
    prober._start("probe", 1)
    processes = list(prober._processes)
    assert [os.getpgid(process.pid) for process in processes] == [process.pid for process in processes]
    prober.kill()  # if a rank had not called setsid, killpg would kill nothing, and the wait would never end
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_failed_searches_are_reported_in_one_line(make_run: MakeRun) -> None:
    run = make_run(determinism="off")
    options = ("--device", "cpu", "--world-size", "2")
    for place, line in (
        ("step", f"{run}: not even one sequence of 32 tokens fits; predicted to fit: l4 or a larger GPU"),
        ("killed", "micro-batch 1: rank 1: its process ended with status -9"),
        ("hang", "micro-batch 1: not all ranks answered within 20 s"),
    ):
        assert one_line(find(run, *options, script=SHORT, FAIL_IN=place, ABOVE="0")) == f"find_batch_size.py: {line}"


def test_no_process_outlives_a_killed_search(make_run: MakeRun) -> None:
    options = ("--device", "cpu", "--set", "train.global_batch_size=null")
    process = launch.start(ROOT / "find_batch_size.py", str(make_run()), *options)
    process.stdout.readline()
    launch.wait_until(process.children, process)  # wait for the ranks of the next probe
    os.kill(process.pid, 9)
    launch.wait_until(lambda: not process.children(), seconds=60)


def test_ctrl_c_is_reported_in_one_line(make_run: MakeRun) -> None:
    process = launch.start(ROOT / "find_batch_size.py", str(make_run()), "--device", "cpu")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(HANG_SECONDS)
    assert (process.returncode, errors) == (130, "find_batch_size.py: interrupted: nothing was written\n")


def test_search_requires_torchrun_or_no_launcher(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(processes: int | None) -> None:
        finder.report_largest(load_run(make_run(str(processes)), []), [], "cpu", processes, write=False)

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match=r"torchrun or without a launcher"):
        search(None)
    with pytest.raises(BadInput, match=r"--world-size: got 2, but torchrun sets the world size"):
        search(2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ended")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # no process listens there
    monkeypatch.setattr("training.parallel.process_group.CONNECT_TIMEOUT", timedelta(milliseconds=100))
    with pytest.raises(BadInput, match=r"torchrun has ended or does not answer"):
        finder.report_largest(load_run(make_run("last"), []), [], "cpu", None, write=False)


def test_bad_input_is_reported_in_one_line(make_run: MakeRun) -> None:
    run, plain = make_run(), make_run("plain", global_batch_size=None, gradient_accumulation_steps=3)
    for directory, options, line in (
        (run, (), "this machine has no GPU; --predict a100-40gb predicts the size for that GPU, and --device cpu runs"),
        (run, ("--predict", "a100"), "unknown GPU 'a100'; did you mean 'a100-"),
        (run, ("--device", "cpu", "--world-size", "9"), "8 micro-batches of 1, too few for world size 9; start at"),
        (
            run,
            ("--predict", "l4", "--world-size", "3", "--set", "determinism=run"),
            'requires an equal number on every rank, which world size 3 does not allow; set determinism to "el',
        ),
        (
            plain,
            ("--device", "cpu", "--write"),
            "--write must not change the global batch, which depends on the micro-batch unless global_batch_size is",
        ),
        (run, ("--device", "cpu", "--write", "--set", "log_interval=2"), "--write: got --set log_interval=2 as well"),
    ):
        if not options and torch.cuda.is_available():
            continue
        message = only_line(find(directory, *options))
        assert message.startswith("find_batch_size.py: ") and line in message


def test_measurement_corrects_the_prediction() -> None:
    run = load_run(ROOT / "runs" / "8xa100", [])
    total, memory = 80 * GIB, MemoryModel.of(run.model, run.train, 8)
    predicted = attrs.evolve(memory, accumulation=2, global_batch_size=None).predict(16).allocated
    as_predicted, twice = ([Report(allocated=times * predicted, usable=total)] for times in (1, 2))
    outside = outside_bytes(8)  # this memory is already in use when `usable` is measured
    assert finder.predicted_largest(memory, as_predicted, 16) == memory.largest_microbatch(total + outside)
    assert finder.predicted_largest(memory, twice, 16) == memory.largest_microbatch(total // 2 + outside)
    assert finder.predicted_largest(memory, [Report()], 16) is None


def test_headroom_is_subtracted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    total, reserved, other_processes = 80 * GIB, 10 * GIB, 3 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - reserved - other_processes, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    assert usable_bytes(torch.device("cuda")) == total - other_processes - int(HEADROOM * total)


def test_write_option_preserves_link_mode_and_line_ends(make_run: MakeRun) -> None:
    directory = make_run()
    path, file = directory / "train.json", directory / "elsewhere.json"
    text = path.read_bytes().replace(b", ", b",\r\n")
    path.unlink()
    path.symlink_to(file.name)
    file.write_bytes(text)
    file.chmod(0o600)
    run = load_run(directory, [])
    finder.check_editable(run.train, [])
    assert finder.write_microbatch(path, 4)
    assert path.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == text.replace(b'"microbatch_size": 2', b'"microbatch_size": 4')
    file.write_bytes(text.replace(b'"microbatch_size"', b'"microbatch\\u005fsize"'))
    with pytest.raises(BadInput, match=r'the key must be spelled "microbatch_size"'):
        finder.check_editable(load_run(directory, []).train, [])
