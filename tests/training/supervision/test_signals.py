"""Runs that are stopped, killed, finished or diverging: the same command goes on, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import BadInput
from tests import launch
from tests.conftest import ROOT, metrics, seal_again, train, train_command, write_run
from tests.walks import children, kill
from training.checkpoints.directory import verify
from training.supervision import run_lock as claim
from training.supervision.run_lock import Claim
from training.telemetry.metrics_log import read_metrics

SLOW = Path(__file__).with_name("slow.py")
LONG = {"min_train_tokens": 200 * 8 * 32, "log_interval": 1, "validation_interval": None, "checkpoint_interval": 50}


def start(
    run: Path,
    ranks: int,
    *options: str,
    as_user: bool = False,
    torchrun: bool = False,
    file_bytes: int | None = None,
    **seconds: float,
) -> Any:
    """Start a run with steps of 10 ms at least. `seconds`: see slow.py; `file_bytes`: tests/launch.py.

    As a user does it, by a command, with torchrun for one rank, too, if asked; or else as tests/launch.py does.
    """
    slow = {name: str(value) for name, value in ({"SLOW_STEP": 0.01} | seconds).items()}
    if not as_user:
        options = ("--device", "cpu", *options)
        return launch.start(SLOW, str(run), *options, ranks=ranks, environment=slow, file_bytes=file_bytes)
    assert file_bytes is None
    command = train_command(run, *options, ranks=ranks, script=SLOW, torchrun=torchrun)
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **slow},
        start_new_session=True,  # a process group of its own, as a terminal's foreground job
    )


def outcome(run: Path) -> str:
    return str(json.loads((run / "exit.json").read_text())["outcome"])


def wait_for_step(run: Path, step: int, process: Any) -> None:
    wait_until(lambda: any(logged >= step for logged in metrics(run, "train_loss")), process)


def wait_until(reached: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_same_weights(first: Path, second: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(run / "checkpoints" / "latest" / file) for run in (first, second))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def test_stopped_and_resumed_equals_straight_to_the_bit(make_run: Callable[..., Path]) -> None:
    straight, stopped = make_run("straight"), make_run("stopped")
    assert train(straight).returncode == 0
    assert train(stopped, "--max-steps", "3").returncode == 0
    done = train(stopped)
    assert done.returncode == 0
    assert "resuming from" in done.stdout
    assert metrics(stopped, "train_loss") == metrics(straight, "train_loss")
    assert metrics(stopped, "grad_norm") == metrics(straight, "grad_norm")
    assert metrics(stopped, "validation_loss")[8] == metrics(straight, "validation_loss")[8]
    assert_same_weights(stopped, straight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_stops_a_lone_process_with_a_checkpoint_and_exit_75(
    make_run: Callable[..., Path], number: signal.Signals
) -> None:
    run = make_run(**LONG)
    process = start(run, ranks=1, as_user=number == signal.SIGTERM)
    wait_for_step(run, 5, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 75, errors
    assert outcome(run) == "stopped"
    assert "stopped early; the same command continues" in output
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert 5 <= state["step"] < 200
    assert verify(run / "checkpoints" / "latest") is None
    assert f"at step {state['step']} of 200" in train(run, "--max-steps", str(state["step"])).stdout


def test_ctrl_c_under_torchrun_leaves_a_checkpoint_and_no_process(make_run: Callable[..., Path]) -> None:
    run = make_run(**LONG)
    process = start(run, ranks=2, as_user=True)
    wait_for_step(run, 5, process)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=40)
    assert "stopped early; the same command continues" in output, errors
    assert process.returncode != 0
    assert 'train.py", line' not in errors  # only torchrun's own words
    assert verify(run / "checkpoints" / "latest") is None
    assert str(run) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


PHASES = {
    "min_train_tokens": 50 * 8 * 32,
    "checkpoint_interval": 25,
    "validation_interval": 50,
    "validation_sequences": 64,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> Path:
    """The run of PHASES, left in peace."""
    run = write_run(tmp_path_factory.mktemp("undisturbed") / "run", token_files, **PHASES)
    assert train(run).returncode == 0
    return run


@pytest.mark.parametrize("phase", ["start", "validation", "save", "step"])
def test_a_signal_is_obeyed_in_every_phase(make_run: Callable[..., Path], undisturbed: Path, phase: str) -> None:
    run = make_run(**PHASES)
    slow = {"SLOW_STEP": 0.02, "SLOW_SAVE": 1.5} | ({"SLOW_VALIDATION": 0.2} if phase == "validation" else {})
    process = start(run, ranks=2, as_user=phase == "start", **slow)
    in_phase = {
        "start": (run / ".lock").exists,  # before the ranks have met
        "validation": lambda: any("event" in record for record in read_metrics(run)),
        "save": lambda: any((run / "checkpoints").glob(".partial-step-*")),
        "step": lambda: any(step % 25 > 5 for step in metrics(run, "train_loss")),
    }
    wait_until(in_phase[phase], process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert json.loads((run / "exit.json").read_text())["status"] == 75, errors
    if phase == "start":
        assert "nothing is lost; the same command continues" in output
        assert not (run / "checkpoints").exists()
    else:
        newest = run / "checkpoints" / "latest"
        step = json.loads((newest / "state.json").read_text())["step"]
        assert verify(newest) is None
        assert max(metrics(run, "train_loss"), default=0) == step
        assert step == 0 if phase == "validation" else 0 < step < 50
    done = train(run)
    assert done.returncode == 0, done.stderr
    assert outcome(run) == "done"
    for key in ("train_loss", "validation_loss"):
        assert metrics(run, key) == metrics(undisturbed, key), key
    assert_same_weights(run, undisturbed)


@pytest.mark.parametrize(("ranks", "asked"), [(1, "the process"), (2, "torchrun"), (2, "rank 0"), (2, "rank 1")])
def test_a_signal_to_any_process_that_starts_up_is_obeyed_at_once(
    make_run: Callable[..., Path], ranks: int, asked: str
) -> None:
    run = make_run()
    process = start(run, ranks=ranks, SLOW_START=60)
    wait_until(lambda: all((run / f"waiting-{rank}").exists() for rank in range(ranks)), process)
    pid = children(process)[int(asked[-1])] if asked.startswith("rank") else process.pid
    os.kill(pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert "Exception in thread" not in errors
    assert output.count("SIGTERM before the first step: nothing is lost; the same command continues") == 1, errors
    assert outcome(run) == "stopped"
    assert not (run / "checkpoints").exists()


def test_one_job_at_a_time_trains_a_run(make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    first = Claim(run)
    monkeypatch.setattr(claim, "LOCK_SECONDS", 0.1)
    with pytest.raises(BadInput, match="another job trains this run; wait for it, or stop it"):
        Claim(run)
    first.end(0)
    assert outcome(run) == "done"
    del first  # as when its process ends
    Claim(run)
    assert not (run / "exit.json").exists()


def test_a_pipe_in_the_place_of_the_lock_is_named(make_run: Callable[..., Path]) -> None:
    run = make_run()
    os.mkfifo(run / ".lock")
    with pytest.raises(BadInput, match=r"\.lock: cannot be written: is a pipe, wanted a regular file"):
        Claim(run)


def test_a_group_that_torchrun_restarts_resumes_by_itself(make_run: Callable[..., Path]) -> None:
    settings = LONG | {"min_train_tokens": 80 * 8 * 32, "checkpoint_interval": 10}
    straight, run = make_run("straight", **settings), make_run("restarted", **settings)
    assert train(straight).returncode == 0
    process = start(run, 2, "--resume", "never", PET_MAX_RESTARTS=1, SLOW_STEP=0.03)
    wait_for_step(run, 25, process)
    kill(children(process)[0])
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "resuming from" in output  # though the command line says never: it has been obeyed once
    *_, record = read_metrics(run)
    assert record["run_ledger"]["lost"] > 25 * 0.03  # of the group that was killed, at 30 ms a step
    assert sum(record["run_ledger"].values()) == pytest.approx(record["elapsed_seconds"], rel=0.01)
    assert metrics(run, "train_loss") == metrics(straight, "train_loss")
    assert_same_weights(run, straight)


STOPPED_RANK = """
import os
import signal

import train
from training import loop, step

plain = step.train_step


def stopped(state, settings, ranks, number, next_batch):
    if number == 2 and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return plain(state, settings, ranks, number, next_batch)


loop.train_step = stopped
train.leave(train.main())
"""


def test_a_group_that_was_asked_to_stop_is_not_restarted(make_run: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED_RANK)
    run = make_run()
    done = train(run, ranks=2, script=script, environment={"PET_MAX_RESTARTS": "2"})
    assert done.returncode == 1
    assert outcome(run) == "stopped"
    assert done.stderr.count("this job ended with status 75, and torchrun started it anew: ending again") == 2
    assert [record["event"] for record in read_metrics(run) if "event" in record] == ["start", "checkpoint", "stopped"]
    assert train(run, ranks=2).returncode == 0


DYING_IN_START_UP = """
import os
import signal
import time

import train
from training import build

plain, plain_start = build._resume, build.start


def start(*arguments):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["DEATH"] == "early":
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # as in a rendezvous
    return plain_start(*arguments)


def resume(job, options, state, ranks):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if ranks.rank == 1:
            time.sleep(1)
            if os.environ["DEATH"] == "error":
                raise ValueError("broken")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)  # as while it reads a large checkpoint
    return plain(job, options, state, ranks)


build._resume, build.start = resume, start
train.leave(train.main())
"""


@pytest.mark.parametrize("death", ["error", "lost"])
def test_a_death_in_start_up_is_no_request_to_stop(make_run: Callable[..., Path], tmp_path: Path, death: str) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING_IN_START_UP)
    run = make_run()
    done = train(run, ranks=2, script=script, environment={"DEATH": death})
    assert done.returncode == 1
    assert "nothing is lost" not in done.stdout
    assert outcome(run) == death


@pytest.mark.parametrize("death", ["early", "lost"])
def test_a_group_restarted_before_it_obeyed_resume_obeys_it(
    make_run: Callable[..., Path], tmp_path: Path, death: str
) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING_IN_START_UP)
    run = make_run()
    assert train(run, ranks=2).returncode == 0
    environment = {"DEATH": death, "PET_MAX_RESTARTS": "1"}
    done = train(run, "--resume", "never", ranks=2, script=script, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "--resume never: what earlier runs wrote is now in" in done.stdout
    assert len(metrics(run, "train_loss")) == 8


def test_a_killed_rank_ends_the_job_promptly_and_nothing_is_saved(make_run: Callable[..., Path]) -> None:
    run = make_run(**LONG | {"checkpoint_interval": 1000})
    process = start(run, ranks=2)
    wait_for_step(run, 5, process)
    began = time.monotonic()
    kill(children(process)[-1])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - began < 40
    assert "Signal 9 (SIGKILL)" in errors
    assert not (run / "checkpoints").exists()
    assert outcome(run) == "lost"


FAILING_RANK = """
import train
from training import loop, step

plain = step.train_step


def failing(state, settings, ranks, number, next_batch):
    if number == 2 and ranks.rank == 1:
        raise RuntimeError("rank one broke")
    return plain(state, settings, ranks, number, next_batch)


loop.train_step = failing
train.leave(train.main())
"""


def test_the_first_traceback_is_visible_and_nobody_waits(make_run: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING_RANK)
    began = time.monotonic()
    done = train(make_run(), ranks=2, script=script)
    assert done.returncode == 1
    assert time.monotonic() - began < 45
    first = done.stderr.index("Traceback (most recent call last)")
    assert "RuntimeError: rank one broke" in done.stderr[first : first + 3000]


def test_a_finished_run_says_so_and_can_start_anew_without_losing_anything(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run).returncode == 0
    again = train(run)
    assert again.returncode == 0
    assert "the run is complete: 8 steps, best validation loss" in again.stdout
    before = (run / "metrics.jsonl").read_text()
    anew = train(run, "--resume", "never", "--max-steps", "1")
    assert anew.returncode == 0
    [archive] = (run / "archive").iterdir()
    assert (archive / "metrics.jsonl").read_text() == before
    assert verify(archive / "checkpoints" / "latest") is None
    assert list(metrics(run, "train_loss")) == [1]


def test_newest_checkpoints_and_the_best_are_kept(make_run: Callable[..., Path]) -> None:
    # A learning rate that ruins the model after the first checkpoints makes an early one the best.
    run = make_run(checkpoint_interval=1, keep_checkpoints=2, learning_rate=0.5, warmup_period_percent=50)
    assert train(run).returncode == 0
    losses = metrics(run, "validation_loss")
    best = min(range(1, 9), key=losses.__getitem__)
    checkpoints = run / "checkpoints"
    names = {f"step-{step:08d}" for step in (best, 7, 8)}
    assert {path.name for path in checkpoints.iterdir()} == names | {"best", "latest"}
    assert (checkpoints / "best").readlink().name == f"step-{best:08d}"
    assert (checkpoints / "latest").readlink().name == "step-00000008"
    assert json.loads((checkpoints / "best" / "state.json").read_text())["validation_loss"] == losses[best]


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run).returncode == 0
    named = train(run, "--resume", "step-00000009")
    assert named.returncode == 1
    assert "no such checkpoint; there are best, latest, step-00000004, step-00000008" in named.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_is_never_applied(make_run: Callable[..., Path], ranks: int) -> None:
    run = make_run(checkpoint_interval=2)
    assert train(run, "--max-steps", "2").returncode == 0
    checkpoint = run / "checkpoints" / "step-00000002"
    weights = load_file(checkpoint / "model.safetensors")
    weights["final_norm.weight"][3] = torch.inf
    save_file(weights, checkpoint / "model.safetensors")
    shutil.copy(checkpoint / "model.safetensors", run / "kept")
    seal_again(checkpoint)
    done = train(run, ranks=ranks)
    assert done.returncode == (3 if ranks == 1 else 1)  # torchrun exits with 1 for any failure
    everyone = ", ".join(str(rank) for rank in range(ranks))
    assert f"step 3: loss is not finite on rank {everyone}; the update was not applied" in done.stderr
    assert done.stderr.count("is not finite") == 1
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert (checkpoint / "model.safetensors").read_bytes() == (run / "kept").read_bytes()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["event"] == "diverged"
    if ranks == 2:
        assert "exitcode  : 3" in done.stderr


POISONED = """
import torch

import train
from training import loop, step

what, bad_ranks = {what!r}, {bad_ranks}
original = step.train_step


def poisoned(state, settings, ranks, number, next_batch):
    if number == 2 and ranks.rank in bad_ranks:
        if what == "loss":
            healthy = step.microbatch_loss
            step.microbatch_loss = lambda *arguments: healthy(*arguments) * torch.nan
        else:
            next(iter(state.parallel.named_parameters().values())).register_hook(lambda grad: grad * torch.inf)
    return original(state, settings, ranks, number, next_batch)


loop.train_step = poisoned
train.leave(train.main())
"""


@pytest.mark.parametrize(
    ("what", "bad_ranks", "message"),
    [
        ("loss", (1,), "step 3: loss is not finite on rank 1; the update was not applied"),
        ("gradient", (0, 1), "step 3: gradient norm is not finite, every loss is; the update was not applied"),
    ],
)
def test_what_is_not_finite_is_named_and_the_state_before_it_kept(
    make_run: Callable[..., Path], tmp_path: Path, what: str, bad_ranks: tuple[int, ...], message: str
) -> None:
    run = make_run(checkpoint_interval=2)
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(what=what, bad_ranks=bad_ranks))
    done = train(run, ranks=2, script=script)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(metrics(run, "train_loss")) == [1, 2]
    assert verify(run / "checkpoints" / "step-00000002") is None
    assert train(run).returncode == 0  # goes on from there


def test_an_overflow_that_lasts_ends_an_fp16_run_too(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(min_train_tokens=40 * 256, validation_interval=None)
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(what="gradient", bad_ranks=(0,)))
    done = train(run, "--set", "precision=fp16", script=script)
    assert done.returncode == 3, done.stderr
    assert "gradient norm is not finite, every loss is" in done.stderr
    norms = metrics(run, "grad_norm")
    assert norms[2] is not None
    assert {norms[step] for step in norms if step > 2} == {None}
    assert len(norms) >= 2 + 16  # the scale fell from 2 ** 16 to below 1 first


def test_resuming_by_name_makes_that_checkpoint_the_newest(make_run: Callable[..., Path]) -> None:
    run = make_run(checkpoint_interval=2)
    assert train(run).returncode == 0
    done = train(run, "--resume", "step-00000004", "--max-steps", "5")
    assert done.returncode == 0, done.stderr
    assert "--resume step-00000004: later checkpoints are now in" in done.stdout
    [archive] = (run / "archive").iterdir()
    assert {path.name for path in (archive / "checkpoints").iterdir()} == {"step-00000006", "step-00000008"}
    again = train(run)
    assert "at step 5 of 8" in again.stdout
    assert list(metrics(run, "train_loss")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_resuming_from_a_copy_that_was_kept_makes_it_the_newest(make_run: Callable[..., Path]) -> None:
    run = make_run(checkpoint_interval=2, keep_checkpoints=1, validation_interval=None)
    assert train(run, "--max-steps", "2").returncode == 0
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "keep-me")
    assert train(run).returncode == 0
    assert not (checkpoints / "step-00000002").exists()
    done = train(run, "--resume", "keep-me", "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    assert "at step 3 of 8" in train(run).stdout
    assert (checkpoints / "keep-me").is_dir()


def test_a_copy_takes_the_place_of_what_has_its_steps_name(make_run: Callable[..., Path]) -> None:
    run = make_run(checkpoint_interval=2, validation_interval=None)
    assert train(run, "--max-steps", "2").returncode == 0
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "keep-me")
    assert train(run, "--resume", "never", "--set", "learning_rate=0.02", "--max-steps", "2").returncode == 0
    [kept] = (run / "archive").glob("*/checkpoints/keep-me")
    shutil.copytree(kept, checkpoints / "keep-me")
    other = (checkpoints / "step-00000002" / "manifest.json").read_text()
    done = train(run, "--resume", "keep-me", "--max-steps", "2")
    assert done.returncode == 0, done.stderr
    wanted = (kept / "manifest.json").read_text()
    assert (checkpoints / "step-00000002" / "manifest.json").read_text() == wanted != other
    moved = {path.read_text() for path in (run / "archive").glob("*/checkpoints/step-00000002/manifest.json")}
    assert moved == {wanted, other}  # the first run's, archived with it, and the one whose place was taken


def test_a_checkpoint_of_another_version_is_refused_in_one_line(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run, "--max-steps", "1").returncode == 0
    path = run / "checkpoints" / "latest"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 1}))
    seal_again(path)
    done = train(run)
    assert done.returncode == 1
    assert "state.json: got format 1, wanted 3: another version of Lockstep wrote it" in done.stderr
