"""launch/: what SkyPilot and Kubernetes start, with the variables that they set, on two machines."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, metrics, train
from tests.long.test_node_kills import end
from tests.machines import Machine
from tests.training.supervision.runs import wait_for_step
from tests.training.supervision.test_nodes import children_of, starts
from tests.walks import kill

SECONDS = 200  # a hang
KEYS = {"min_train_tokens": 400 * 8 * 32, "validation_interval": None, "checkpoint_interval": 20}


def skypilot(machine: Machine, run: Path, *options: str) -> subprocess.Popen[str]:
    """Run the file's command as SkyPilot does; without its bucket."""
    text = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())["run"]
    bucket = '--set "checkpoints=$CHECKPOINTS"'
    assert bucket in text
    environment = {
        "RUN": str(run),
        "SKYPILOT_NODE_RANK": str("ab".index(machine.name)),
        "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    return machine.start("bash", "-c", text.replace(bucket, " ".join(options)), environment=environment)


def kubernetes(machine: Machine, run: Path, *options: str) -> subprocess.Popen[str]:
    """Run the file's container as Kubeflow Trainer does; without its bucket."""
    trainer = list(yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text()))[1]["spec"]["trainer"]
    [command], [_, *bucket] = trainer["command"], trainer["args"]
    assert bucket == ["--set", "checkpoints=s3://BUCKET/PREFIX"]
    environment = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str("ab".index(machine.name)),
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "29500",
    }
    return machine.start(command.replace("/lockstep", str(ROOT)), str(run), *options, environment=environment)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_skypilots_machines_go_on_after_a_rank_is_lost(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine]
) -> None:
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    nodes = [skypilot(machine, run, "--hash-every", "100") for machine in machines]
    wait_for_step(run, 40, nodes[0])
    [node_script] = children_of(children_of(nodes[1].pid)[0])
    [torchrun] = children_of(node_script)
    kill(children_of(torchrun)[0])
    outputs = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert starts(run) == [2, 2]
    assert train(alone, "--hash-every", "100").returncode == 0
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pod_that_is_drained_saves_and_asks_for_another_start(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine]
) -> None:
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    pods = [kubernetes(machine, run, "--hash-every", "100") for machine in machines]
    wait_for_step(run, 40, pods[0])
    os.kill(children_of(pods[1].pid)[0], signal.SIGTERM)
    outputs = [pod.communicate(timeout=SECONDS) for pod in pods]
    assert [pod.returncode for pod in pods] == [75, 75], outputs
    pods = [kubernetes(machine, run, "--hash-every", "100") for machine in machines]
    outputs = [pod.communicate(timeout=SECONDS) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert train(alone, "--hash-every", "100").returncode == 0
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [skypilot, kubernetes])
def test_an_error_asks_for_no_other_start(
    engine: Callable[..., subprocess.Popen[str]], make_run: Callable[..., Path], machines: tuple[Machine, Machine]
) -> None:
    run = make_run("run")
    nodes = [engine(machine, run, "--set", "dataset=absent") for machine in machines]
    try:
        output = nodes[0].communicate(timeout=SECONDS)
        assert nodes[0].returncode == 78, output
    finally:
        for node in nodes:
            if node.poll() is None:
                end(node)
