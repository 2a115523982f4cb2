"""Random disturbances of real runs: they are killed at any moment, or stopped and continued with another layout.

Whatever happens, the run must end in the same state as an undisturbed run.
"""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from tests import launch
from tests.conftest import ROOT, MakeRun, complete, metrics, train_command
from tests.launch import wait_until
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import find_to_resume
from training.telemetry.metrics_log import METRICS, read_counted, read_metrics

VICTIMS = ("a rank", "all ranks", "torchrun", "everything")
# Steps between checkpoints. With so few steps, a save is nearly always in progress when a run is killed.
KILL_INTERVAL = 5
KILL_MODEL = {"context_length": 16}
KILL_SETTINGS = {
    "global_batch_size": 16,  # 8 micro-batches, for up to 8 ranks
    "checkpoint_interval": KILL_INTERVAL,
    "validation_interval": 50,
    "validation_sequences": 4,
    "keep_checkpoints": 2,
}


@attrs.frozen(kw_only=True)
class Layout:
    """The number of ranks and the wrapper with which a run is started."""

    ranks: int
    parallel: str

    def __str__(self) -> str:
        return f"{self.ranks} {self.parallel}"


def kill_again_and_again(
    make_run: MakeRun, layouts: list[Layout], kills: int, *, steps: int, as_user: bool
) -> tuple[list[str], set[str]]:
    """Kill runs until enough kills have happened, and let each run finish.

    Return a log with a line per kill, and all final hashes, including the hash of an undisturbed run on one rank. Each
    run has `steps` steps. With `as_user`, runs are started with a command line, as a user would start them; otherwise,
    tests/launch.py starts them. The number of kills is also the random seed. Assert that no durable checkpoint is lost,
    and that a kill costs at most the steps between two checkpoints, plus the steps that were trained while a checkpoint
    was being written.
    """
    generator = random.Random(kills)
    settings = KILL_SETTINGS | {"min_train_tokens": steps * 16 * 16}
    straight = make_run("straight", KILL_MODEL, **settings)
    complete(straight)
    log, hashes = [], {final_hash(straight)}
    while len(log) < kills:
        run = make_run(f"killed-{len(log)}", KILL_MODEL, **settings)
        while len(log) < kills:
            line = start_and_kill(run, generator.choice(layouts), generator, as_user)
            if line is None:  # the run ended before the kill
                break
            log.append(f"{len(log) + 1:3}  {line}")
            print(log[-1], flush=True)
        complete(run, ranks=generator.choice([1, 2]))
        hashes.add(final_hash(run))
        assert metrics(run, "train_loss") == metrics(straight, "train_loss")
        assert metrics(run, "validation_loss") == metrics(straight, "validation_loss")
    return log, hashes


def start_and_kill(run: Path, layout: Layout, generator: random.Random, as_user: bool) -> str | None:
    """Start a run, kill some of its processes, and check that all of them end.

    Return a line for the log, or None if the run ended first.
    """
    options = ("--set", f"parallel={layout.parallel}")
    before = last_step(run)
    if as_user:
        command = train_command(run, *options, ranks=layout.ranks)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    else:
        process = launch.start(ROOT / "train.py", str(run), "--device", "cpu", *options, ranks=layout.ranks)
    start_seconds = 4.0 if as_user else 0.6
    at_start = generator.random() < 0.2
    if not at_start:  # kill during training, some time after the first new step
        wait_until(lambda: size_of(run) != before[1] or process.poll() is not None)
    time.sleep(generator.uniform(0, start_seconds if at_start else 1.5))
    workers = children(process) if layout.ranks > 1 else [process.pid]
    if process.poll() is not None:
        assert process.returncode == 0, process.communicate()[1]
        return None
    victims = generator.choice(VICTIMS) if workers and layout.ranks > 1 else "everything"
    pids = {
        "a rank": [generator.choice(workers)] if workers else [],
        "all ranks": workers,
        "torchrun": [process.pid],
        "everything": [process.pid, *workers],
    }[victims]
    for pid in pids:
        kill(pid)
    process.communicate(timeout=90)
    wait_until(lambda: not processes(run), seconds=60)  # surviving ranks end when they notice that torchrun has ended
    step, _ = last_step(run)
    durable = [record["step"] for record in events(run, "checkpoint")]
    intact = find_to_resume(checkpoints_of(run), "auto")
    resumes_at = 0 if intact is None else int(intact.name.removeprefix("step-"))
    assert resumes_at >= max(durable, default=0)
    redone = step - resumes_at
    assert redone <= 2 * KILL_INTERVAL, (step, resumes_at)
    return f"{layout!s:7} kill -9 {victims:11} at step {step:5}, resumes at {resumes_at:5}, {redone} redone"


def walk(run: Path, layouts: list[Layout], steps: int, generator: random.Random) -> list[str]:
    """Train a run to its end in up to five jobs with random layouts; return a description of each job."""
    stops = sorted(generator.sample(range(1, steps), generator.randint(2, 4)))
    legs = []
    for stop in [*stops, steps]:
        layout = generator.choice(layouts)
        options = ("--set", f"parallel={layout.parallel}", "--max-steps", str(stop), "--hash-every", "1")
        complete(run, *options, ranks=layout.ranks)
        legs.append(f"{layout} to step {stop}")
    return legs


def final_hash(run: Path) -> str:
    """Return the `state_sha256` of the newest checkpoint."""
    return json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["state_sha256"]


def last_step(run: Path) -> tuple[int, int]:
    """Return the last step in the metrics, and the size of the metrics in bytes."""
    steps = [record["step"] for record in read_metrics(run) if "train_loss" in record]
    return max(steps, default=0), size_of(run)


def size_of(run: Path) -> int:
    """Return the size of the metrics in bytes."""
    return (run / METRICS).stat().st_size if (run / METRICS).exists() else 0


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return all events of this kind that a run has recorded."""
    return [record for record in read_metrics(run) if record.get("event") == kind]


def starts(run: Path) -> list[int]:
    """Return the world size of each job that has started, including jobs whose steps were all superseded."""
    return [record["world_size"] for record in read_counted(run).records if record.get("event") == "start"]


def children(process: launch.Process | subprocess.Popen[str] | int) -> list[int]:
    """Return the child processes of a process, such as torchrun's ranks, in the order of their start."""
    if isinstance(process, launch.Process):
        return process.children()
    return _pgrep("-P", str(process if isinstance(process, int) else process.pid))


def processes(run: Path) -> list[int]:
    """Find a run's processes by their command lines, and return their ids. Forks of launch.py are not found."""
    return _pgrep("-f", f"train.py {run}( |$)")


def _pgrep(*options: str) -> list[int]:
    return [int(word) for word in launch.execute("pgrep", *options).stdout.split()]


def kill(pid: int) -> None:
    """Kill a process, unless it has ended already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end(machine: subprocess.Popen[str]) -> None:
    """Kill all processes of a machine. They die with unshare's child, which is the first process of their namespace."""
    for pid in children(machine):
        kill(pid)
    machine.kill()
