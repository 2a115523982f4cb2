"""Two machines with a disk each, killed again and again: the other one ends in time, and the bits stay."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import train
from tests.machines import Machine, two_machines
from tests.walks import final_hash, kill, last_step
from training.telemetry.metrics_log import read_metrics

KILLS, INTERVAL, TIMEOUT = 20, 10, 60
FAULTS = ("power cut", "processes killed", "cable pulled", "a disk lost")
KEYS = {
    "min_train_tokens": 4000 * 8 * 32,
    "checkpoint_interval": INTERVAL,
    "validation_interval": None,
    "log_interval": 1,
    "timeout_seconds": TIMEOUT,
    "keep_checkpoints": 2,
    "max_epochs": 100,
}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nodes_are_killed_at_random_and_the_bits_stay(make_run: Callable[..., Path], tmp_path: Path) -> None:
    draw = random.Random(KILLS)
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    disk = tmp_path / "disk-b"
    disk.mkdir()
    for name in ("model.json", "train.json"):
        shutil.copy(run / name, disk)
    with two_machines(tmp_path) as machines:
        for number in range(KILLS):
            print(f"{number + 1:3}  {kill_one(machines, run, draw)}", flush=True)
        last = ("--max-steps", str(last_step(run)[0] + INTERVAL))
        nodes = start_both(machines, run, *last)
        outputs = [node.communicate(timeout=600) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
    assert train(alone, *last).returncode == 0
    assert final_hash(run) == final_hash(alone)


def start_both(machines: tuple[Machine, Machine], run: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Start both machines, the second one with a disk of its own."""
    master = machines[0].address
    return [
        machines[0].train(run, *options, master=master),
        machines[1].train(run, *options, master=master, own_disk=run),
    ]


def kill_one(machines: tuple[Machine, Machine], run: Path, draw: random.Random) -> str:
    """Start both machines, let a fault come to one, see that the other ends; return a line about it."""
    before = last_step(run)[0]
    nodes = start_both(machines, run)
    deadline = time.monotonic() + 180
    while last_step(run)[0] <= before:
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes), nodes[0].communicate()[1]
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 3))
    fault, struck = draw.choice(FAULTS), draw.randrange(2)
    at = last_step(run)[0]
    began = time.monotonic()
    if fault in {"power cut", "cable pulled"}:
        machines[struck].plug(cable=False)
    if fault != "cable pulled":
        end(nodes[struck])
    others = nodes if fault == "cable pulled" else [nodes[1 - struck]]
    for node in others:
        node.communicate(timeout=TIMEOUT / 2 + 30)
        assert node.returncode != 0
    seconds = time.monotonic() - began
    nodes[struck].communicate()
    machines[struck].plug(cable=True)
    disks = [run, machines[1].folder / "disk-b"]
    if fault == "a disk lost":
        shutil.rmtree(disks[struck] / "checkpoints", ignore_errors=True)
    durable = max((record["step"] for record in read_metrics(run) if record.get("event") == "checkpoint"), default=0)
    held = [int(path.name[5:]) for folder in disks for path in folder.glob("checkpoints/step-*")]
    assert max(held, default=0) >= durable and at - max(held, default=0) <= 2 * INTERVAL
    return f"{fault} on {machines[struck].name} at step {at}, the rest ended in {seconds:.0f} s, resumes at {max(held)}"


def end(process: subprocess.Popen[str]) -> None:
    """Kill a machine's processes: those of its namespace die with the first, of which unshare is the parent."""
    parent = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    for pid in subprocess.run(parent, capture_output=True, text=True, check=True).stdout.split():
        kill(int(pid))
    process.kill()
