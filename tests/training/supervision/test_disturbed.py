"""If output is lost or advisory code fails, at any step, the run has the same bits and records what was lost."""

import json
import os
import pty
import random
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, MakeRun, metrics, slow, train, train_command
from tests.training.supervision.runs import LONG, assert_same_weights, outcome, start, wait_for_step
from tests.walks import events
from training.checkpoints.directory import checkpoints_of, steps_in

DISTURBED = Path(__file__).with_name("disturbed.py")
KINDS = ("closed", "closed by Python", "full disk", "closed terminal", "no reader")
STEPS = 8  # number of steps of each run that make_run writes
ADVICE = (
    "training.telemetry.time_ledger:TimeLedger.longest_step_seconds",
    "training.telemetry.time_ledger:TimeLedger.typical_seconds",
    "training.telemetry.reporter:describe_slowest",
    "training.telemetry.reporter:ProgressBar.advance",
    "training.telemetry.reporter:ProgressBar.show",
    "training.telemetry.time_ledger:TimeLedger.steps_per_second",
    "training.telemetry.time_ledger:TimeLedger.usd",
    "training.telemetry.time_ledger:TimeLedger.record",
    "training.telemetry.chart:BackgroundChart.redraw",
    "training.telemetry.chart:BackgroundChart.finish",
    "training.parallel.step_clock:_seconds",
    "training.loop:count_due",
    "training.job:introduce",
    "training.job:summarize",
)


def dropped(run: Path) -> dict[str, str]:
    return {record["what"]: record["problem"] for record in events(run, "dropped")}


def losses(seed: int, kinds: tuple[str, ...] = KINDS) -> str:
    """Choose a random step and a random kind of failure for each stream. Return them as the value of LOSSES."""
    generator = random.Random(seed)
    return json.dumps([[generator.randrange(STEPS), number, generator.choice(kinds)] for number in (1, 2)])


@pytest.mark.parametrize(("seed", "ranks"), [(1, 1), (2, 2), *slow(*((seed, 1 + seed % 2) for seed in range(3, 33)))])
def test_run_survives_lost_output(make_run: MakeRun, finished: Path, seed: int, ranks: int) -> None:
    run, planned = make_run(), losses(seed, KINDS if seed < 3 else (*KINDS, "stopped reader"))
    done = train(run, script=DISTURBED, ranks=ranks, environment={"LOSSES": planned})
    assert (done.returncode, outcome(run)) == (0, "done"), (planned, done.stderr)
    numbers = [number for _, number, kind in json.loads(planned) if kind != "closed by Python"]
    assert dropped(run).keys() == {("stdout", "stderr")[number - 1] for number in numbers}, planned
    assert_same_weights(run, finished)


def test_run_without_readers_obeys_a_signal(make_run: MakeRun) -> None:
    run = make_run(**LONG)
    process = start(run, ranks=2)
    wait_for_step(run, 2, process)
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert outcome(run) == "stopped" and steps_in(checkpoints_of(run))


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_survives_failures_of_advisory_code(make_run: MakeRun, finished: Path, ranks: int) -> None:
    run, environment = make_run(), {"BROKEN": json.dumps(ADVICE)}
    done = train(run, "--price-per-hour", "1", script=DISTURBED, ranks=ranks, environment=environment)
    assert (done.returncode, outcome(run)) == (0, "done") and "Traceback" not in done.stderr, done.stderr
    assert metrics(run, "train_loss") == metrics(finished, "train_loss")
    assert_same_weights(run, finished)
    names = {"progress bar", "rates of a step", "time ledger", "events", "chart", "summary", "remaining time"}
    assert dropped(run).keys() >= names | {"introduction", *(["step clock"] if ranks > 1 else [])}
    assert all(problem.endswith(": advice") for problem in dropped(run).values())
    assert done.stderr.count("WARNING: progress bar: dropped: ZeroDivisionError in ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("streams", [">&- 2>&-", "> /dev/full 2>&1", "2>&1 | true", "2>&1 | head -n 3"])
def test_user_may_discard_any_output(make_run: MakeRun, finished: Path, streams: str, ranks: int) -> None:
    run = make_run()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = f"{shlex.join(train_command(run, ranks=ranks))} {streams}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, timeout=180, check=False)
    assert (done.returncode, outcome(run)) == (0, "done")
    assert_same_weights(run, finished)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_disowned_run_survives_its_terminal(make_run: MakeRun, ranks: int) -> None:
    run = make_run(**LONG)
    controller, terminal = pty.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(train_command(run, ranks=ranks), cwd=ROOT, **streams)
    os.close(terminal)
    wait_for_step(run, 2, process)
    os.close(controller)
    assert (process.wait(180), outcome(run)) == (0, "done")
    assert dropped(run).keys() == {"stdout", "stderr"}
