"""The commands in docs/nodes.md and launch/ run as SkyPilot and Kubernetes run them. Exit statuses, and odd paths."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, MakeRun, complete, metrics
from tests.launch import execute
from tests.machines import Machine, Machines
from tests.training.supervision.runs import wait_for_step
from tests.walks import children, end, kill, starts

SECONDS = 200  # a process that takes longer must be hanging
KEYS = {"min_train_tokens": 400 * 8 * 32, "validation_interval": None, "checkpoint_interval": 20}


def skypilot(machine: Machine, run: Path, *options: str) -> subprocess.Popen[str]:
    """Run the command in launch/skypilot.yaml as SkyPilot does, but without the bucket."""
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
    """Run the container's command in launch/kubernetes.yaml as Kubeflow Trainer does, but without the bucket."""
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


def assert_hashes_of_one_process(
    nodes: list[subprocess.Popen[str]], run: Path, alone: Path, interval: str = "100"
) -> None:
    """Wait for the nodes of a run, and compare its hashes with those of a run in one process."""
    outputs = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    complete(alone, "--hash-every", interval)
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_commands_train_two_machines(make_run: MakeRun, machines: Machines) -> None:
    [block] = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "nodes.md").read_text(), flags=re.DOTALL)
    set_up, firewall, addresses, *torchruns = block.splitlines()
    # These two commands cannot run on a test machine.
    assert set_up.startswith("./setup_lambda.sh ") and firewall.startswith("sudo ufw allow ")
    alone, run = make_run("alone"), make_run("run")
    environment = {"PATH": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    shown = machines[0].start("bash", "-c", addresses).communicate(timeout=60)[0]
    assert machines[0].address in shown.split()
    nodes: list[subprocess.Popen[str]] = []
    for machine, command in zip(machines, torchruns, strict=True):
        here = command.replace("10.0.0.1", machines[0].address).replace("runs/8xa100", f"{run} --hash-every 1")
        here = here.replace("--nproc_per_node=8", "--nproc_per_node=1")
        disk = None if machine is machines[0] else run
        nodes.append(machine.start("bash", "-c", here, own_disk=disk, environment=environment))
    assert_hashes_of_one_process(nodes, run, alone, "1")
    assert (machines[1].disk / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_skypilot_machines_continue_after_losing_a_rank(make_run: MakeRun, machines: Machines) -> None:
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    nodes = [skypilot(machine, run, "--hash-every", "100") for machine in machines]
    wait_for_step(run, 40, nodes[0])
    [node_script] = children(children(nodes[1])[0])
    [torchrun] = children(node_script)
    kill(children(torchrun)[0])
    assert_hashes_of_one_process(nodes, run, alone)
    assert starts(run) == [2, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_drained_pod_saves_and_asks_to_restart(make_run: MakeRun, machines: Machines) -> None:
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    pods = [kubernetes(machine, run, "--hash-every", "100") for machine in machines]
    wait_for_step(run, 40, pods[0])
    os.kill(children(pods[1])[0], signal.SIGTERM)
    outputs = [pod.communicate(timeout=SECONDS) for pod in pods]
    assert [pod.returncode for pod in pods] == [75, 75], outputs
    assert_hashes_of_one_process([kubernetes(machine, run, "--hash-every", "100") for machine in machines], run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [skypilot, kubernetes])
def test_an_error_does_not_ask_to_restart(
    engine: Callable[..., subprocess.Popen[str]], make_run: MakeRun, machines: Machines
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


NODE = str(ROOT / "launch" / "node.sh")
ALONE = os.environ | {"PET_NPROC_PER_NODE": "1", "PET_STANDALONE": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_permanent_errors_do_not_ask_to_restart(make_run: MakeRun, tmp_path: Path) -> None:
    run, broken = make_run(), make_run("broken")
    (broken / "train.json").write_text("{")
    moved = tmp_path / "clone" / "launch" / "node.sh"  # in a folder without .venv
    moved.parent.mkdir(parents=True)
    shutil.copy(NODE, moved)
    cases: list[tuple[list[str], dict[str, str], str]] = [
        ([NODE, str(run), "--unknown"], {}, "--unknown"),
        ([NODE, "--set", "learning_rate=-1", str(run)], {}, "learning_rate"),
        ([NODE, str(run), "--max-steps", "x"], {}, "--max-steps"),
        ([NODE, str(run), "--max-usd", "1"], {}, "--max-usd needs --price-per-hour"),
        ([NODE, str(run), "--resume=never"], {}, "every start would use --resume"),
        ([NODE], {}, "RUN"),
        ([NODE, str(tmp_path / "absent")], {}, "absent"),
        ([NODE, str(run / "train.json")], {}, "train.json"),
        ([NODE, str(broken)], {}, "train.json: not JSON"),
        ([NODE, str(run)], {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ([NODE, str(run)], {"PET_NPROC_PER_NODE": "many"}, "torchrun cannot start here: ValueError: Unsupported nproc"),
        ([str(moved), str(run)], {"PATH": "/usr/bin:/bin"}, "there is no torchrun"),
    ]
    started = [
        subprocess.Popen(command, env=ALONE | environment, stderr=subprocess.PIPE, text=True)
        for command, environment, _ in cases
    ]
    refused = subprocess.Popen([NODE, str(run), "--resume"], stderr=subprocess.PIPE)
    assert refused.stderr is not None
    refused.stderr.close()
    assert refused.wait(SECONDS) == 78
    for process, (command, _, line) in zip(started, cases, strict=True):
        errors = process.communicate(timeout=SECONDS)[1]
        assert process.returncode == 78 and line in errors, (command, errors)


def test_jobset_accepts_the_names_of_failure_rules() -> None:
    runtime = next(yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text()))
    [rule] = runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # the pattern of JobSet's webhook


def test_two_boxes_refuses_a_repeated_node() -> None:
    command = [str(ROOT / "launch" / "two_boxes.sh"), "runs/x", "10.0.0.1", "user@10.0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == "two_boxes.sh: 10.0.0.1 is given twice; give each node once\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_boxes_never_executes_parts_of_paths(make_run: MakeRun, tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"  # a fake ssh to this machine, where the user's shell is dash
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done\nexec sh -c "$3"\n')
    ssh.chmod(0o755)
    run = make_run('a run\'s "name" $(touch executed) `touch executed` & \\ \t;')
    environment = ALONE | {"PATH": f"{ssh.parent}:{os.environ['PATH']}", "RANKS": "1"}
    command = [str(ROOT / "launch" / "two_boxes.sh"), str(run), "node", "--", "--set", "random_seed=7"]
    for name in ("pid", "status", "log"):
        os.mkfifo(run / f".node-node.{name}")  # the loop must not wait for these pipes
    reader, output = os.pipe()
    os.close(reader)  # the loop must continue if nobody reads its output
    looping = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    os.close(output)
    assert looping.wait(SECONDS) == 0, (run / ".node-node.log").read_text()
    assert metrics(run, "train_loss") and not list(ROOT.glob("executed"))
    absent = subprocess.run([*command[:1], str(tmp_path / "absent"), "node"], cwd=ROOT, env=environment, check=False)
    assert absent.returncode == 78


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("exit 1", "does not run; pass the path of Python 3.10 or newer"),
        ("echo 3.9 0", "got Python 3.9, expected 3.10"),
    ],
)
def test_a_wrong_interpreter_is_reported_first(tmp_path: Path, program: str, problem: str) -> None:
    for name, text in (
        ("python", program),
        ("apt-get", f"touch {tmp_path}/asked"),
        ("sudo", f"touch {tmp_path}/asked"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for python in (f"{tmp_path}/python", *([f"{tmp_path}/nowhere"] if program == "exit 1" else [])):
        done = execute("bash", ROOT / "setup_lambda.sh", PYTHON=python, **path)
        assert done.returncode == 1 and done.stderr.startswith(f"setup_lambda.sh: PYTHON={python}: {problem}")
    assert not (tmp_path / "asked").exists()
