"""Supervision: stops, deaths and restarts in every phase leave the right exit record and checkpoint."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MakeRun, complete, metrics, one_line, slow, train, write_run
from tests.launch import wait_until
from tests.training.supervision.runs import LONG, assert_same_weights, exit_of, outcome, start, wait_for_step
from tests.walks import children, kill
from training.checkpoints.saved_state import verify
from training.telemetry.metrics_log import read_metrics


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)])
def test_signal_stops_one_process_with_a_checkpoint(make_run: MakeRun, number: signal.Signals) -> None:
    run = make_run(**LONG)
    process = start(run, ranks=1, as_user=number == signal.SIGINT)
    wait_for_step(run, 5, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 75, errors
    assert outcome(run) == "stopped"
    assert "stopped early; run the same command again to continue" in output
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert 5 <= state["step"] < 200
    assert verify(run / "checkpoints" / "latest") is None
    assert f"at step {state['step']} of 200" in train(run, "--max-steps", str(state["step"])).stdout


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_no_process(make_run: MakeRun) -> None:
    run = make_run(**LONG)
    process = start(run, ranks=2, as_user=True)
    wait_for_step(run, 5, process)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=180)
    assert "stopped early; run the same command again to continue" in output, errors
    assert process.returncode != 0
    assert 'train.py", line' not in errors  # there is no traceback except torchrun's
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
    """An uninterrupted run with the settings in PHASES."""
    run = write_run(tmp_path_factory.mktemp("undisturbed") / "run", token_files, **PHASES)
    complete(run)
    return run


@pytest.mark.parametrize("phase", [*slow("start", "validation", "save"), "step"])
def test_signal_is_obeyed_in_every_phase(make_run: MakeRun, undisturbed: Path, phase: str) -> None:
    run = make_run(**PHASES)
    slow = {"SLOW_STEP": 0.02, "SLOW_SAVE": 1.5} | ({"SLOW_VALIDATION": 0.2} if phase == "validation" else {})
    process = start(run, ranks=2, as_user=phase == "start", **slow)
    in_phase = {
        "start": (run / ".lock").exists,  # before the ranks have connected
        "validation": lambda: any("event" in record for record in read_metrics(run)),
        "save": lambda: any((run / "checkpoints").glob(".partial-step-*")),
        "step": lambda: any(step % 25 > 5 for step in metrics(run, "train_loss")),
    }
    wait_until(in_phase[phase], process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert process.returncode != 0
    assert json.loads((run / "exit.json").read_text())["status"] == 75, errors
    if phase == "start":
        assert "nothing is lost; run the same command again" in output
        assert not (run / "checkpoints").exists()
    else:
        newest = run / "checkpoints" / "latest"
        step = json.loads((newest / "state.json").read_text())["step"]
        assert verify(newest) is None
        assert max(metrics(run, "train_loss"), default=0) == step
        assert step == 0 if phase == "validation" else 0 < step < 50
    complete(run)
    assert outcome(run) == "done"
    for key in ("train_loss", "validation_loss"):
        assert metrics(run, key) == metrics(undisturbed, key), key
    assert_same_weights(run, undisturbed)


@pytest.mark.parametrize(
    ("ranks", "receiver"), [(2, "rank 1"), *slow((1, "the process"), (2, "torchrun"), (2, "rank 0"))]
)
def test_signal_during_start_up_is_obeyed_immediately(make_run: MakeRun, ranks: int, receiver: str) -> None:
    run = make_run()
    process = start(run, ranks=ranks, SLOW_START=600)
    wait_until(lambda: all((run / f"waiting-{rank}").exists() for rank in range(ranks)), process)
    pid = children(process)[int(receiver[-1])] if receiver.startswith("rank") else process.pid
    os.kill(pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert "Exception in thread" not in errors
    assert output.count("SIGTERM before the first step: nothing is lost; run the same command again") == 1, errors
    assert outcome(run) == "stopped"
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_ranks_restarted_by_torchrun_resume(make_run: MakeRun) -> None:
    settings = LONG | {"min_train_tokens": 80 * 8 * 32, "checkpoint_interval": 10}
    straight, run = make_run("straight", **settings), make_run("restarted", **settings)
    complete(straight)
    process = start(run, 2, "--resume", "never", PET_MAX_RESTARTS=1, SLOW_STEP=0.03)
    wait_for_step(run, 25, process)
    kill(children(process)[0])
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "resuming from" in output  # `--resume never` applies only to the first start, not to torchrun's restart
    *_, record = read_metrics(run)
    assert record["run_ledger"]["lost"] > 25 * 0.03  # the killed ranks had trained for 25 steps of 30 ms
    assert sum(record["run_ledger"].values()) == pytest.approx(record["elapsed_seconds"], rel=0.01)
    assert metrics(run, "train_loss") == metrics(straight, "train_loss")
    assert_same_weights(run, straight)


@pytest.mark.slow
def test_stopped_ranks_are_not_restarted(make_run: MakeRun, at_step_3: Callable[..., Path]) -> None:
    run, script = make_run(), at_step_3("os.kill(os.getpid(), signal.SIGTERM)")
    done = train(run, ranks=2, script=script, environment={"PET_MAX_RESTARTS": "2"})
    assert done.returncode == 1
    assert outcome(run) == "stopped"
    assert done.stderr.count("train.py: this job ended with status 75, but torchrun restarted it; it ends again") == 2
    assert [record["event"] for record in read_metrics(run) if "event" in record] == ["start", "checkpoint", "stopped"]
    complete(run, ranks=2)


DYING_IN_START_UP = """
plain, plain_start = job.resume, process_group.start


def start(*arguments):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["DEATH"] == "early":
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # like a slow rendezvous
    return plain_start(*arguments)


def resume(request, state, ranks, disk, bucket):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if ranks.rank == 1:
            time.sleep(1)
            if os.environ["DEATH"] == "error":
                raise ValueError("broken")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)  # like reading a large checkpoint
    return plain(request, state, ranks, disk, bucket)


job.resume, process_group.start = resume, start
"""


@pytest.mark.parametrize("death", ["error", *slow("lost")])
def test_death_in_start_up_is_not_a_stop(make_run: MakeRun, changed_train: Callable[[str], Path], death: str) -> None:
    run = make_run()
    done = train(run, ranks=2, script=changed_train(DYING_IN_START_UP), environment={"DEATH": death})
    assert done.returncode == 1
    assert "nothing is lost" not in done.stdout
    assert outcome(run) == death


@pytest.mark.slow
@pytest.mark.parametrize("death", ["early", "lost"])
def test_ranks_restarted_before_resuming_obey_the_resume_option(
    copied: Path, changed_train: Callable[[str], Path], death: str
) -> None:
    script = changed_train(DYING_IN_START_UP)
    environment = {"DEATH": death, "PET_MAX_RESTARTS": "1"}
    done = complete(copied, "--resume", "never", ranks=2, script=script, environment=environment)
    assert "--resume never: earlier results are now in" in done.stdout
    assert len(metrics(copied, "train_loss")) == 8


LATE = """
plain_load = sys.modules["training.config.train_config"].load_run


def late(*arguments):
    if os.environ["RANK"] != os.environ["EARLY"]:
        time.sleep(30)  # like a slow disk
    elif os.environ["EARLY"] == "1":
        from common.errors import BadInput

        while not os.path.exists(os.path.join(sys.argv[1], ".lock")):
            time.sleep(0.05)  # until rank 0 has locked the run, because only then can it write exit.json
        raise BadInput("only this rank", alone=True)
    return plain_load(*arguments)


sys.modules["training.config.train_config"].load_run = late
"""


@pytest.mark.parametrize("early", ["0", "1"])
def test_all_ranks_report_the_first_reason(make_run: MakeRun, changed_train: Callable[[str], Path], early: str) -> None:
    """torchrun stops the late rank. That rank must not print that it was stopped, or that "nothing is lost"."""
    run, script = make_run(), changed_train("import sys\nimport training.config.train_config\n" + LATE)
    done = train(run if early == "1" else run / "missing", ranks=2, script=script, environment={"EARLY": early})
    assert done.returncode == 1
    assert ("only this rank" if early == "1" else "no such run directory") in one_line(done)
    assert "nothing is lost" not in done.stdout + done.stderr and "<NO_OTHER_FAILURES>" in done.stderr
    if early == "1":
        job_exit = exit_of(run)  # written by rank 0, which has waited for rank 1
        assert (job_exit.outcome, job_exit.reason, job_exit.problem) == ("error", "user-error", "only this rank")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "options", ["--bogus", "--max-usd 1", "--set nope=1", "--resume nothing", "--look 9999", "--replay 1 99"]
)
def test_refusal_is_printed_once(copied: Path, ranks: int, options: str) -> None:
    done = train(copied, *options.split(), ranks=ranks)
    assert done.stderr.count("\ntrain.py: ") + done.stderr.startswith("train.py: ") == 1
    assert "nothing is lost" not in done.stdout + done.stderr and "<NO_OTHER_FAILURES>" in done.stderr


def test_killed_rank_ends_the_job_without_saving(make_run: MakeRun) -> None:
    run = make_run(**LONG | {"checkpoint_interval": 1000})
    process = start(run, ranks=2)
    wait_for_step(run, 5, process)
    kill(children(process)[-1])
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "Signal 9 (SIGKILL)" in errors
    assert not (run / "checkpoints").exists()
    job_exit = exit_of(run)
    assert (job_exit.outcome, job_exit.reason) == ("lost", "lost-rank")


def test_first_traceback_is_visible_and_no_rank_waits(make_run: MakeRun, at_step_3: Callable[..., Path]) -> None:
    run = make_run()
    done = train(run, ranks=2, script=at_step_3('raise RuntimeError("rank one broke")'))
    assert done.returncode == 1
    first = done.stderr.index("Traceback (most recent call last)")
    assert "RuntimeError: rank one broke" in done.stderr[first : first + 3000]
    job_exit = exit_of(run)  # written by rank 0, whose collective has failed
    assert (job_exit.reason, job_exit.problem) == ("crash", "RuntimeError: rank one broke")


@pytest.mark.parametrize(
    ("error", "reason", "problem"),
    [
        ("torch.OutOfMemoryError('CUDA out of memory')", "out-of-memory", "rank 1: the GPU's memory is too small"),
        ("BadInput('a disk is full', alone=True, reason='disk-full')", "disk-full", "a disk is full"),
    ],
)
def test_job_has_the_reason_of_the_failed_rank(
    make_run: MakeRun, at_step_3: Callable[..., Path], error: str, reason: str, problem: str
) -> None:
    run = make_run()
    done = train(run, ranks=2, script=at_step_3(f"import torch; from common.errors import BadInput; raise {error}"))
    assert done.returncode == 1
    job_exit = exit_of(run)
    assert (job_exit.status, job_exit.outcome, job_exit.reason) == (1, "error", reason), done.stderr
    assert str(job_exit.problem).startswith(problem)
