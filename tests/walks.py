"""Random disturbances of real runs: kill -9 at any instant, and stops that change world size and wrapper.

Whatever happens, the run must end in the state of the one that was left in peace.
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
KILL_INTERVAL = 5  # steps between checkpoints of a run to be killed: a save is nearly always in flight
KILL_MODEL = {"context_length": 16}
KILL_SETTINGS = {
    "global_batch_size": 16,  # 8 micro-batches: up to 8 ranks
    "checkpoint_interval": KILL_INTERVAL,
    "validation_interval": 50,
    "validation_sequences": 4,
    "keep_checkpoints": 2,
}


@attrs.frozen(kw_only=True)
class Layout:
    """How a run is started."""

    ranks: int
    parallel: str

    def __str__(self) -> str:
        return f"{self.ranks} {self.parallel}"


def kill_again_and_again(
    make_run: MakeRun, layouts: list[Layout], kills: int, *, steps: int, as_user: bool
) -> tuple[list[str], set[str]]:
    """Kill runs until enough kills have hit; let each run end. Return a log, a line a kill, and all final hashes.

    Runs have so many steps and are started as a user does, or else by tests/launch.py; the number of kills is the seed.
    The first hash is of an undisturbed run on one rank. Asserts that no durable checkpoint is lost and that no more
    steps are redone than lie between two checkpoints and were done while one was being written.
    """
    draw = random.Random(kills)
    settings = KILL_SETTINGS | {"min_train_tokens": steps * 16 * 16}
    straight = make_run("straight", KILL_MODEL, **settings)
    complete(straight)
    log, hashes = [], {final_hash(straight)}
    while len(log) < kills:
        run = make_run(f"killed-{len(log)}", KILL_MODEL, **settings)
        while len(log) < kills:
            line = start_and_kill(run, draw.choice(layouts), draw, as_user)
            if line is None:  # the run was faster
                break
            log.append(f"{len(log) + 1:3}  {line}")
            print(log[-1], flush=True)
        complete(run, ranks=draw.choice([1, 2]))
        hashes.add(final_hash(run))
        assert metrics(run, "train_loss") == metrics(straight, "train_loss")
        assert metrics(run, "validation_loss") == metrics(straight, "validation_loss")
    return log, hashes


def start_and_kill(run: Path, layout: Layout, draw: random.Random, as_user: bool) -> str | None:
    """Start a run, kill something, see that everything ends; return a line about it, or None if the run ended first."""
    options = ("--set", f"parallel={layout.parallel}")
    before = last_step(run)
    if as_user:
        command = train_command(run, *options, ranks=layout.ranks)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    else:
        process = launch.start(ROOT / "train.py", str(run), "--device", "cpu", *options, ranks=layout.ranks)
    start_seconds = 4.0 if as_user else 0.6
    at_start = draw.random() < 0.2
    if not at_start:  # in training: some time after the first new step
        wait_until(lambda: size_of(run) != before[1] or process.poll() is not None)
    time.sleep(draw.uniform(0, start_seconds if at_start else 1.5))
    workers = children(process) if layout.ranks > 1 else [process.pid]
    if process.poll() is not None:
        assert process.returncode == 0, process.communicate()[1]
        return None
    victims = draw.choice(VICTIMS) if workers and layout.ranks > 1 else "everything"
    chosen = {
        "a rank": [draw.choice(workers)] if workers else [],
        "all ranks": workers,
        "torchrun": [process.pid],
        "everything": [process.pid, *workers],
    }[victims]
    for pid in chosen:
        kill(pid)
    process.communicate(timeout=90)
    wait_until(lambda: not processes(run), seconds=60)  # a rank that outlives torchrun stops by itself
    step, _ = last_step(run)
    durable = [record["step"] for record in events(run, "checkpoint")]
    intact = find_to_resume(checkpoints_of(run), "auto")
    resumes_at = 0 if intact is None else int(intact.name.removeprefix("step-"))
    assert resumes_at >= max(durable, default=0)
    redone = step - resumes_at
    assert redone <= 2 * KILL_INTERVAL, (step, resumes_at)
    return f"{layout!s:7} kill -9 {victims:11} at step {step:5}, resumes at {resumes_at:5}, {redone} redone"


def walk(run: Path, layouts: list[Layout], steps: int, draw: random.Random) -> list[str]:
    """Take a run to its end in up to five legs, each on another layout; return what it did."""
    stops = sorted(draw.sample(range(1, steps), draw.randint(2, 4)))
    legs = []
    for stop in [*stops, steps]:
        layout = draw.choice(layouts)
        options = ("--set", f"parallel={layout.parallel}", "--max-steps", str(stop), "--hash-every", "1")
        complete(run, *options, ranks=layout.ranks)
        legs.append(f"{layout} to step {stop}")
    return legs


def final_hash(run: Path) -> str:
    """Return the `state_sha256` of the newest checkpoint."""
    return json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["state_sha256"]


def last_step(run: Path) -> tuple[int, int]:
    """Return the last step that the metrics tell of, and their size in bytes."""
    steps = [record["step"] for record in read_metrics(run) if "train_loss" in record]
    return max(steps, default=0), size_of(run)


def size_of(run: Path) -> int:
    """Return the size of the metrics in bytes."""
    return (run / METRICS).stat().st_size if (run / METRICS).exists() else 0


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of the events of a kind."""
    return [record for record in read_metrics(run) if record.get("event") == kind]


def starts(run: Path) -> list[int]:
    """Return the world size of each job that has started, also of those of which no step is left."""
    return [record["world_size"] for record in read_counted(run).records if record.get("event") == "start"]


def children(process: launch.Process | subprocess.Popen[str] | int) -> list[int]:
    """Return what a process has started, in order: the ranks of torchrun, the workers of a preparation."""
    if isinstance(process, launch.Process):
        return process.children()
    return _found("-P", str(process if isinstance(process, int) else process.pid))


def processes(run: Path) -> list[int]:
    """Return the process ids of a run's torchruns and ranks, by their command lines: no forked ones."""
    return _found("-f", f"train.py {run}( |$)")


def _found(*options: str) -> list[int]:
    return [int(word) for word in launch.execute("pgrep", *options).stdout.split()]


def kill(pid: int) -> None:
    """Kill a process that may have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end(machine: subprocess.Popen[str]) -> None:
    """Kill a machine's processes: those of its namespace die with the first, of which unshare is the parent."""
    for pid in children(machine):
        kill(pid)
    machine.kill()
