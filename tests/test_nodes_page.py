"""docs/nodes.md: its commands, run on two machines."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, metrics, train
from tests.machines import two_machines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_boxes_train_by_the_commands_of_the_page(make_run: Callable[..., Path], tmp_path: Path) -> None:
    [block] = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "nodes.md").read_text(), flags=re.DOTALL)
    set_up, firewall, addresses, *torchruns = block.splitlines()
    assert set_up.startswith("./setup_lambda.sh ") and firewall.startswith("sudo ufw allow ")  # not for a test machine
    alone, run = make_run("alone"), make_run("run")
    assert train(alone, "--hash-every", "1").returncode == 0
    own_disk = tmp_path / "disk-b"
    own_disk.mkdir()
    for name in ("model.json", "train.json"):
        (own_disk / name).write_text((run / name).read_text())
    environment = {"PATH": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    with two_machines(tmp_path) as machines:
        told = machines[0].start("bash", "-c", addresses).communicate(timeout=60)[0]
        assert machines[0].address in told.split()
        nodes: list[subprocess.Popen[str]] = []
        for machine, command in zip(machines, torchruns, strict=True):
            here = command.replace("10.0.0.1", machines[0].address).replace("runs/8xa100", f"{run} --hash-every 1")
            here = here.replace("--nproc_per_node=8", "--nproc_per_node=1")
            disk = None if machine is machines[0] else run
            nodes.append(machine.start("bash", "-c", here, own_disk=disk, environment=environment))
        outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")
    assert (own_disk / "checkpoints" / "latest").exists()
