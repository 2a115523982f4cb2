"""How torchrun ends: its table of failures, and our command that runs torchrun without its log and tracebacks."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, MakeRun, train
from tests.launch import execute, wait_until
from tests.training.supervision.runs import LONG, SLOW, outcome, wait_for_step
from tests.walks import children, kill

QUIET = [sys.executable, "-m", "training.supervision.torchrun", "--nproc_per_node=2"]


def test_torchrun_table_ends_with_our_line(make_run: MakeRun) -> None:
    for options, message in (
        (["--set", "learning_rate=-1"], "--set: learning_rate"),
        (["--dtset"], "--dtset: unknown option"),
    ):
        done = train(make_run(message[:3]), *options, ranks=2)
        assert done.stderr.splitlines()[-2].startswith(f"  traceback : {message}"), done.stderr
        assert done.stderr.count(f"train.py: {message}") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "last"), [("Ctrl-C", 75, "stopped, status 75"), ("kill", 1, "rank 1: Signal 9 (SIGKILL) rec")]
)
def test_last_line_is_the_command_to_continue(make_run: MakeRun, end: str, status: int, last: str) -> None:
    variables, pipe = {"SLOW_STEP": "0.01", "LOCKSTEP_NEXT": "make train", "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    run = make_run(**LONG)
    command = [*QUIET, str(SLOW), str(run), "--device", "cpu"]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | variables, stderr=pipe, text=True, start_new_session=True
    ) as process:
        wait_for_step(run, 5, process)
        if end == "kill":
            kill(children(process)[-1])
        else:
            os.killpg(process.pid, signal.SIGINT)
            os.killpg(process.pid, signal.SIGINT)
        lines = process.communicate(timeout=180)[1].splitlines()
    assert process.returncode == status
    assert lines[-1].startswith(last) and lines[-1].endswith("; to continue, run make train")
    assert end == "kill" or not any("torch/" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("closed", [False, True])
def test_ctrl_c_or_closed_terminal_under_make_saves(make_run: MakeRun, closed: bool) -> None:
    run = make_run(**LONG | {"min_train_tokens": 10**7, "max_epochs": 50})
    tmux = ["tmux", "-S", str(run / "socket")]
    up_to_date = [f"-o{file}" for file in (".venv/installed", "token_files/quickstart/manifest.json")]
    make = ["make", "train", f"BIN={Path(sys.executable).parent}", f"QUICKSTART={run}", *up_to_date]
    with subprocess.Popen([*tmux, "-D"], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}) as server:
        try:
            wait_until((run / "socket").exists, server)
            keep, new = ("set", "-g", "remain-on-exit", "on", ";"), ("new", "-d", "-x80", "-y24")
            execute(*tmux, *keep, *new, f"{shlex.join(make)}; true")
            wait_for_step(run, 5, server)
            execute(*tmux, *(["kill-pane"] if closed else ["send-keys", "C-c"]))
            wait_until((run / "exit.json").exists, server)
            assert outcome(run) == "stopped" and list((run / "checkpoints").glob("step-*"))
            if not closed:
                wait_until(lambda: "Interrupt" in execute(*tmux, "capture-pane", "-p").stdout, server)
                output, _, after = execute(*tmux, "capture-pane", "-p").stdout.partition("\nmake: *** ")
                assert output.splitlines()[-1] == "stopped, status 75; to continue, run make train", output
                assert "checkpoints  " in output and len(after.split("\n\n")[0].splitlines()) == 1
        finally:
            server.terminate()
