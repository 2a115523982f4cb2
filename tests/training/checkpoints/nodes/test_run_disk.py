"""The disk of a run directory: setups that are impossible without a shared disk are refused before the first step."""

import json

import pytest

from tests.conftest import MakeRun
from tests.machines import Machines
from tests.training.checkpoints.nodes.test_node_copies import train_on


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_impossible_node_setups_give_one_line(make_run: MakeRun, machines: Machines) -> None:
    run = make_run()
    disk = machines[1].disk
    _, errors = train_on(machines, run, "--set", "parallel=fsdp", status=1)
    where = f"train.py: {run}: the nodes (a, b) do not share this directory"
    assert f'{where}, and "parallel": "fsdp" shards over all nodes, so no node would have a complete' in errors
    values = json.loads((disk / "train.json").read_text())
    rate = {"learning_rate": 0.02}, f"{run}: train.learning_rate: got 0.02 on b, but 0.01 on the first node, a; use"
    for change, message in (
        rate,
        ({"tensor_parallel": 2}, "tensor_parallel: got 1 on this node and 2 on another node"),
    ):
        (disk / "train.json").write_text(json.dumps(values | change))
        assert f"train.py: {message}" in train_on(machines, run, status=1)[1]
    assert not (run / "checkpoints").exists() and not [path for path in run.iterdir() if "shared-disk" in path.name]
