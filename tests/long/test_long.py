"""Tests that take a quarter of an hour, with random walks over layouts and all kinds of kills: `make test-long`."""

import os
import random
import shutil
import signal
import subprocess
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.bucket import Bucket
from tests import launch
from tests.bucket_server import BucketServer
from tests.conftest import MakeRun, complete, metrics, start_training
from tests.launch import wait_until
from tests.machines import Machines
from tests.model.architectures import MUON_RECIPE, NANOCHAT
from tests.training.checkpoints.conftest import IMPATIENT
from tests.training.parallel.test_layouts import VARIANTS, numbers_of, train_on
from tests.walks import Layout, end, final_hash, kill_again_and_again, last_step, walk
from training.checkpoints.bucket_download import fetch
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import complete_steps
from training.telemetry.metrics_log import read_metrics

STEPS = 16
LAYOUTS = [Layout(ranks=ranks, parallel=parallel) for ranks, parallel in product(range(1, 9), ("ddp", "fsdp"))]
SMALL = [layout for layout in LAYOUTS if layout.ranks <= 2]
KILLS, NODE_INTERVAL, TIMEOUT = 20, 10, 60
FAULTS = ("power cut", "processes killed", "cable pulled", "a disk lost")
NODE_KEYS = {
    "min_train_tokens": 4000 * 8 * 32,
    "checkpoint_interval": NODE_INTERVAL,
    "validation_interval": None,
    "log_interval": 1,
    "timeout_seconds": TIMEOUT,
    "keep_checkpoints": 2,
    "max_epochs": 100,
}
IN_BUCKET = {"min_train_tokens": 6 * 8 * 32, "checkpoint_interval": 2, "validation_interval": 2, "keep_checkpoints": 1}
PATIENTLY: dict[str, Any] = {"script": IMPATIENT, "environment": {"BUCKET_SECONDS": "60"}}  # for a busy machine
SLOWLY: dict[str, Any] = {"script": IMPATIENT, "environment": {"BUCKET_SECONDS": "60", "SLOW_STEP": "0.1"}}
SECONDS = 120  # a process that takes longer must be hanging

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("variant", ["fp32", "bf16", "NanoChat with Muon"])
def test_all_layouts_have_the_same_hashes(tmp_path: Path, token_files: Path, variant: str) -> None:
    numbers_by_layout = {}
    for layout in LAYOUTS:
        run = VARIANTS[variant].write(tmp_path / str(layout), token_files, token_files, token_files)
        train_on(run, variant, f"1x{layout}")
        numbers_by_layout[str(layout)] = numbers_of(run)
        print(
            f"{variant}  {layout!s:7}",
            *(value[:12] for value in numbers_by_layout[str(layout)][0].values()),
            flush=True,
        )
    assert all(numbers == numbers_by_layout["1 ddp"] for numbers in numbers_by_layout.values())


@pytest.mark.parametrize(
    ("model", "recipe"), [({"drop_rate": 0.1}, {}), (NANOCHAT, MUON_RECIPE)], ids=["gpt2", "nanochat"]
)
def test_ten_random_walks_end_with_the_same_bits(
    make_run: MakeRun, model: dict[str, Any], recipe: dict[str, Any]
) -> None:
    settings = recipe | {"global_batch_size": 16, "min_train_tokens": STEPS * 16 * 32, "checkpoint_interval": 3}
    straight = make_run("straight", model, **settings)
    complete(straight, "--hash-every", "1", ranks=2)
    draw = random.Random(20)
    for number in range(10):
        run = make_run(f"walk-{number}", model, **settings)
        legs = walk(run, LAYOUTS, STEPS, draw)
        same = all(metrics(run, key) == metrics(straight, key) for key in ("state_sha256", "train_loss", "grad_norm"))
        print(f"walk {number + 1:2}: {'; '.join(legs)}: {'same' if same else 'DIFFERENT'}", flush=True)
        assert same


def test_a_hundred_kills_change_nothing(make_run: MakeRun) -> None:
    log, hashes = kill_again_and_again(make_run, [*SMALL * 4, *LAYOUTS], kills=100, steps=800, as_user=True)
    assert len(log) == 100
    assert len(hashes) == 1
    print(f"100 kills, one final state: {hashes}", flush=True)


def test_random_node_kills_do_not_change_bits(make_run: MakeRun, machines: Machines) -> None:
    draw = random.Random(KILLS)
    alone, run = make_run("alone", **NODE_KEYS), make_run("run", **NODE_KEYS)
    for number in range(KILLS):
        print(f"{number + 1:3}  {kill_one(machines, run, draw)}", flush=True)
    last = ("--max-steps", str(last_step(run)[0] + NODE_INTERVAL))
    nodes = start_both(machines, run, *last)
    outputs = [node.communicate(timeout=600) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    complete(alone, *last)
    assert final_hash(run) == final_hash(alone)


def start_both(machines: Machines, run: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Start training on both machines. The second machine has a separate disk."""
    disks = zip(machines, (None, run), strict=True)
    return [machine.train(run, *options, master=machines[0].address, own_disk=disk) for machine, disk in disks]


def kill_one(machines: Machines, run: Path, draw: random.Random) -> str:
    """Train on two machines, let a random fault hit one, check that the other ends, and return a line for the log."""
    before = last_step(run)[0]
    nodes = start_both(machines, run)
    wait_until(lambda: last_step(run)[0] > before or any(node.poll() is not None for node in nodes), seconds=180)
    assert all(node.poll() is None for node in nodes), nodes[0].communicate()[1]
    time.sleep(draw.uniform(0, 3))
    fault, victim = draw.choice(FAULTS), draw.randrange(2)
    at = last_step(run)[0]
    began = time.monotonic()
    if fault in {"power cut", "cable pulled"}:
        machines[victim].plug(cable=False)
    if fault != "cable pulled":
        end(nodes[victim])
    survivors = nodes if fault == "cable pulled" else [nodes[1 - victim]]
    for node in survivors:
        node.communicate(timeout=TIMEOUT / 2 + 30)
        assert node.returncode != 0
    seconds = time.monotonic() - began
    nodes[victim].communicate()
    machines[victim].plug(cable=True)
    disks = [run, machines[1].disk]
    if fault == "a disk lost":
        shutil.rmtree(disks[victim] / "checkpoints", ignore_errors=True)
    durable = max((record["step"] for record in read_metrics(run) if record.get("event") == "checkpoint"), default=0)
    saved_steps = [int(path.name[5:]) for folder in disks for path in folder.glob("checkpoints/step-*")]
    assert max(saved_steps, default=0) >= durable and at - max(saved_steps, default=0) <= 2 * NODE_INTERVAL
    victim_at_step = f"{fault} on {machines[victim].name} at step {at}"
    return f"{victim_at_step}, the rest ended in {seconds:.0f} s, resumes at {max(saved_steps)}"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_kills_during_uploads_lose_no_checkpoint(make_run: MakeRun, bucket_server: BucketServer, moment: str) -> None:
    straight = make_run("straight", **IN_BUCKET)
    complete(straight, **PATIENTLY)
    killed, number = True, 0
    while killed:
        number += 1
        prefix = f"s3://runs/killed-{moment}-{number}"
        run, blank = (make_run(f"{name}-{number}", **IN_BUCKET, checkpoints=prefix) for name in ("killed", "blank"))
        bucket_server.calm()
        process = start_training(run, **SLOWLY)

        def kill(request: int, process: launch.Process = process, number: int = number) -> None:
            if request == number:
                os.killpg(process.pid, signal.SIGKILL)

        setattr(bucket_server, moment, kill)
        killed = process.wait(SECONDS) == -signal.SIGKILL
        bucket_server.calm()
        bucket = Bucket(prefix)
        saved_names = complete_steps(bucket)
        for name in saved_names:
            assert fetch(bucket, checkpoints_of(run.with_name(f"fetched-{number}")) / name) is None
        resumed = complete(blank, **PATIENTLY)
        assert (
            f"downloading {saved_names[-1]}" in resumed.stdout if saved_names else "downloading" not in resumed.stdout
        )
        assert final_hash(blank) == final_hash(straight), number
        names = {path.partition("/")[0] for path in bucket.objects()}
        assert names <= {"latest", "best", *complete_steps(bucket)}, number  # nothing is left behind
        last = saved_names[-1] if saved_names else "nothing"
        print(f"{moment} request {number}: {'killed' if killed else 'not reached'}, {last}")
    assert number > 20
