"""launch/two_boxes.sh over real ssh, a disk on each machine: the first one dies, the loop dies, Ctrl-C stops both."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import train
from tests.long.test_node_kills import end
from tests.long.test_slurm import KEYS, TIMEOUT, processes, starts, wait_for
from tests.machines import Machine
from tests.walks import children, final_hash, last_step

SERVER = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PidFile none
"""
CLIENT = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_boxes_that_answer_go_on_without_the_first_and_without_the_loop(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine]
) -> None:
    keys = KEYS | {"min_train_tokens": 2000 * 8 * 32}
    alone, run, folder = make_run("alone", **keys), make_run("run", **keys), machines[0].folder
    write_ssh_files(folder)
    disk = folder / "disk-b"
    disk.mkdir()
    for name in ("model.json", "train.json"):
        shutil.copy(run / name, disk)
    servers = [serve(machine, run) for machine in machines]
    loops = [loop(machines[1], run)]
    try:
        wait_for(lambda: last_step(run)[0] > 20, 180)
        machines[0].plug(cable=False)
        end(servers[0])
        wait_for(lambda: not processes(run), TIMEOUT / 2 + 30)
        wait_for(lambda: last_step(disk)[0] > 20, 180)
        end(loops[0])
        machines[0].plug(cable=True)
        servers[0] = serve(machines[0], run)
        loops.append(loop(machines[1], run))
        assert loops[1].stdout is not None and "running: 10.77.0.2," in loops[1].stdout.readline()
        # as Ctrl-C, which a shell ignores where its parent does
        os.kill(children(loops[1])[0], signal.SIGTERM)
        output = loops[1].communicate(timeout=120)
        assert loops[1].returncode == 75 and not processes(run), output
        loops.append(loop(machines[1], run))
        output = loops[2].communicate(timeout=300)
        assert loops[2].returncode == 0, output
    finally:
        for process in (*servers, *loops):
            if process.poll() is None:
                end(process)
    assert train(alone).returncode == 0
    assert starts(run) == [2, 2] and starts(disk) == [1]
    assert final_hash(run) == final_hash(disk) == final_hash(alone)


def write_ssh_files(folder: Path) -> None:
    """Write a key, a server's configuration and an `ssh` that has the key; without sshd, skip the test."""
    if shutil.which("sshd") is None or not shutil.which("ssh-keygen"):
        pytest.skip("needs sshd: apt-get install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "server").write_text(SERVER.format(folder=folder))
    (folder / "client").write_text(CLIENT.format(folder=folder))
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    ssh.chmod(0o755)


def serve(machine: Machine, run: Path) -> subprocess.Popen[str]:
    """Start sshd, which all processes of the machine are children of; the second machine has its own disk."""
    sshd = (str(shutil.which("sshd")), "-D", "-e", "-f", str(machine.folder / "server"))
    return machine.start(*sshd, own_disk=run if machine.name == "b" else None)


def loop(machine: Machine, run: Path) -> subprocess.Popen[str]:
    environment = {"PATH": f"{machine.folder}/bin:{os.environ['PATH']}", "RANKS": "1"}
    return machine.start("launch/two_boxes.sh", str(run), "10.77.0.1", "10.77.0.2", environment=environment)
