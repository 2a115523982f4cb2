"""Jobs on two machines: a stop on one of them ends both, and a run continues when a machine joins."""

import os
import signal

import pytest

from tests.conftest import ROOT, MakeRun, complete, metrics
from tests.launch import wait_until
from tests.machines import TORCHRUN, Machine
from tests.training.supervision.runs import LONG, SLOW, outcome, wait_for_step
from tests.walks import children, kill, starts

SECONDS = 300  # a job that takes longer counts as hanging
STEPS = {"min_train_tokens": 100 * 8 * 32}
SLOWLY = {"SLOW_STEP": "0.1", "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize(("began", "stopped"), [(True, 1), (True, 0), (False, 1)])
def test_stop_on_one_node_ends_all(
    make_run: MakeRun, machines: tuple[Machine, Machine], began: bool, stopped: int
) -> None:
    alone, run = make_run("alone", **LONG | STEPS), make_run("run", **LONG | STEPS)
    environment = SLOWLY | {"PET_MAX_RESTARTS": "3"} | ({} if began else {"SLOW_START": "600"})
    nodes = [
        node.train(run, "--hash-every", "20", master="10.77.0.1", script=SLOW, environment=environment)
        for node in machines
    ]
    if began:
        wait_for_step(run, 5, nodes[0])
    else:
        wait_until(lambda: all((run / f"waiting-{rank}").exists() for rank in range(2)), nodes[0])
    [torchrun] = children(nodes[stopped])  # the only child of unshare
    os.kill(torchrun, signal.SIGTERM)
    outputs = [node.communicate(timeout=60) for node in nodes]  # although torchrun waits for its peers for 10 minutes
    assert all(node.returncode for node in nodes), outputs
    assert outcome(run) == "stopped", outputs
    complete(run, "--hash-every", "20")
    complete(alone, "--hash-every", "20")
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")


@pytest.mark.slow
@pytest.mark.parametrize("failed", [False, True])
def test_joining_node_continues_the_run(make_run: MakeRun, machines: tuple[Machine, Machine], failed: bool) -> None:
    alone, run = make_run("alone", **LONG | STEPS), make_run("run", **LONG | STEPS)
    complete(alone, "--hash-every", "20")
    nodes = []
    for node in machines:
        meeting = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=job")
        node_options = (f"--rdzv-conf=is_host={int(node is machines[0])}", f"--local-addr={node.address}")
        # Without this variable, torchrun of torch 2.13 cannot add nodes to a job.
        environment = SLOWLY | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        options = ("--max-restarts=1", str(SLOW), str(run), "--hash-every", "20", "--resume", "never")
        nodes.append(node.start(*TORCHRUN, *meeting, *node_options, *options, environment=environment))
        if len(nodes) == 1:
            wait_for_step(run, 20, nodes[0])
            if failed:  # then torchrun on this node counts a restart, but torchrun on the other node does not
                [torchrun] = children(nodes[0])
                kill(children(torchrun)[0])
                wait_until(lambda: len(starts(run)) == 2, nodes[0])
    outputs = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outcome(run) == "done"
    assert starts(run) == ([1, 1, 2] if failed else [1, 2])
    assert not list(run.glob("archive*"))
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")
