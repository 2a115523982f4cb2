"""Heartbeats: if a rank freezes or hangs, or if torchrun has ended, the job ends and names the cause."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, MakeRun, complete, metrics, train
from tests.launch import execute, wait_until
from tests.training.supervision.runs import LONG, outcome, start, wait_for_step
from tests.walks import children, kill
from training.checkpoints.saved_state import verify
from training.supervision.beats import BEAT_SECONDS
from training.telemetry.metrics_log import read_metrics

TIMEOUT_SECONDS = 10  # a rank counts as lost after half of this time
SETTINGS = LONG | {"min_train_tokens": 900 * 8 * 32, "checkpoint_interval": 5, "timeout_seconds": TIMEOUT_SECONDS}
LINE = r"[\w/]+\.py:\d+, [\w<>]+"
POSITION = rf"at step \d+ in (\w+ \()?{LINE}\)?"
COLLECTIVE = rf"at step \d+ in (all|reduce|broadcast)\w+ \({LINE}\)"


def assert_no_process_left(run: Path) -> None:
    """Wait until no process has this run in its command line.

    The processes of tests/launch.py itself have ended when `communicate` returns, but a chart may still be drawn.
    """
    wait_until(lambda: str(run) not in execute("ps", "-eo", "args").stdout, seconds=60)


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "frozen"), [(2, [0]), (2, [1]), (4, [2]), (4, [1, 2]), (4, [0, 1, 3])])
def test_frozen_ranks_are_named_and_end_the_job(make_run: MakeRun, ranks: int, frozen: list[int]) -> None:
    run = make_run(**SETTINGS)
    process = start(run, ranks)
    wait_for_step(run, 6, process)
    time.sleep(2 * BEAT_SECONDS)  # wait for new beats, because steps are much shorter than BEAT_SECONDS
    pids = children(process)
    for rank in frozen:
        os.kill(pids[rank], signal.SIGSTOP)
    saved: set[str] = set()
    while saved != (saved := checkpoints(run)):  # until no save is in progress and the other ranks wait
        time.sleep(1)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    [(number, line)] = [pair for pair in enumerate(errors.splitlines()) if pair[1].startswith("train.py:")]
    assert line == (
        f"train.py: no answer from rank {', '.join(map(str, frozen))}; run the same command again to continue from the "
        "last checkpoint. Where each rank was at its last heartbeat:"
    )
    table = errors.splitlines()[number + 1 : number + 1 + ranks]
    for rank in frozen:
        seconds = "5" if len(frozen) == 1 else "[3-5]"
        process_text = rf"\(\S+, pid {pids[rank]}, silent for {seconds} s\)"
        assert re.fullmatch(rf"  rank {rank} {process_text}: {POSITION}", table[rank])
    waiting = min({*range(ranks)} - {*frozen})
    assert re.fullmatch(rf"  rank {waiting} \(\S+, pid {pids[waiting]}\): {COLLECTIVE}", table[waiting]), table
    assert checkpoints(run) == saved
    if 0 not in frozen:
        assert outcome(run) == "lost"
    assert_no_process_left(run)
    if frozen == [1]:
        reached = max(metrics(run, "train_loss"))
        done = complete(run, "--max-steps", str(reached + 5), ranks=2)
        assert "resuming from" in done.stdout
        assert max(metrics(run, "train_loss")) == reached + 5


@pytest.mark.slow
def test_stuck_rank_is_shown_in_a_table(make_run: MakeRun, at_step_3: Callable[..., Path]) -> None:
    run = make_run(timeout_seconds=TIMEOUT_SECONDS)
    done = train(run, ranks=2, script=at_step_3("step.microbatch_loss = lambda *_: time.sleep(1000)"))
    assert done.returncode == 1
    head = r"train\.py: a collective failed on rank 0\. Where each rank was at its last heartbeat:"
    [(first, second)] = re.findall(rf"{head}\n  (.*)\n  (.*)\n", done.stderr)
    assert re.fullmatch(rf"rank 0 \(\S+, pid \d+\): at step 3 in \w+ \({LINE}\)", first)
    assert re.fullmatch(r"rank 1 \(\S+, pid \d+\): at step 3 in training/step\.py:\d+, run_microbatches", second)
    assert "SIGKILL" not in done.stderr  # the stuck rank ends before torchrun kills it
    assert done.stderr.index("a collective failed") < done.stderr.index("Traceback (most recent call last)")
    assert not (run / "checkpoints").exists()
    assert_no_process_left(run)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_save_when_torchrun_is_killed(make_run: MakeRun, ranks: int) -> None:
    run = make_run(**SETTINGS | {"checkpoint_interval": 1000})
    process = start(run, ranks, as_user=True, torchrun=True)
    wait_for_step(run, 5, process)
    process.kill()
    output, errors = process.communicate(timeout=180)  # waits for the ranks, which still hold torchrun's pipes open
    assert "stopped early; run the same command again to continue" in output, errors
    assert errors.count("train.py: torchrun has ended; stopping at the next step") == 1
    assert [record["event"] for record in read_metrics(run) if "event" in record][-1] == "stopped"
    assert verify(run / "checkpoints" / "latest") is None
    assert_no_process_left(run)


def test_ranks_end_when_torchrun_is_killed_before_training(make_run: MakeRun) -> None:
    run = make_run()
    process = start(run, ranks=2, SLOW_START=600)
    wait_until(lambda: all((run / f"waiting-{rank}").exists() for rank in range(2)), process)
    kill(process.pid)
    _, errors = process.communicate(timeout=180)  # waits for the ranks, which still hold torchrun's pipes open
    assert errors.count("train.py: torchrun has ended") == 1
    assert not (run / "exit.json").exists()
    assert not (run / "checkpoints").exists()


SLEEPING = """
import os
import time

import torch
from torch.distributed import TCPStore

from training.parallel.process_group import Ranks
from training.supervision import beats, heartbeat

beats.BEAT_SECONDS = heartbeat.BEAT_SECONDS = 0.1
server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(server.port), TORCHELASTIC_RUN_ID="sleeping")
fields = dict(device=torch.device("cpu"), control=None, download=None)
two_ranks = [Ranks(rank=rank, world_size=2, **fields) for rank in range(2)]
reactions = dict(lost=os.abort, stopped=os.abort, orphaned=os.abort)
heartbeats = [heartbeat.Heartbeat(ranks, 1, **reactions) for ranks in two_ranks]
time.sleep(0.5)
print("asleep", flush=True)
time.sleep(1)
print(*heartbeats[0].beats.report(), sep="\\n", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_sleeping_machine_loses_no_rank() -> None:
    command = [sys.executable, "-c", SLEEPING]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "asleep\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # three times as long as a rank may be silent
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert re.fullmatch(r"(rank [01] \(\S+, pid \d+\): starting up in \S.*\n){2}", output), output + errors


SAVING = """
import os
import subprocess
import sys
import threading
import time

import torch

from training.parallel.process_group import Ranks
from training.supervision import beats, heartbeat

beats.BEAT_SECONDS = heartbeat.BEAT_SECONDS = 0.02
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
port = server.stdout.readline().strip()
nodes = dict(RANK="0", GROUP_RANK="0", GROUP_WORLD_SIZE="2")
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, TORCHELASTIC_RUN_ID="saving", **nodes)
orphaned = threading.Event()
ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"), control=None, download=None)
heartbeat.Heartbeat(ranks, 1, lost=lambda: print("lost", flush=True), stopped=os.abort, orphaned=orphaned.set)
time.sleep(0.5)
server.kill()
assert orphaned.wait(60)
time.sleep(5 * heartbeat.STORE_POLLS * heartbeat.BEAT_SECONDS)
print("saved", flush=True)
os._exit(0)
"""
STORE = """
import time

from torch.distributed import TCPStore

store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_rank_has_time_to_save_after_torchrun_has_ended() -> None:
    done = execute(sys.executable, "-c", SAVING, STORE)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr


def test_rank_ends_if_its_torchrun_has_ended(make_run: MakeRun, changed_train: Callable[[str], Path]) -> None:
    script = changed_train("import datetime; process_group.CONNECT_TIMEOUT = datetime.timedelta(seconds=1)")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    one_rank = dict.fromkeys(["RANK", "LOCAL_RANK"], "0") | dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], "1")
    torchrun = {"TORCHELASTIC_RUN_ID": "gone", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    server = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = make_run()
    done = train(run, environment=one_rank | torchrun | server, script=script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "train.py: torchrun has ended or does not answer; run the same command again"
    assert outcome(run) == "lost"
