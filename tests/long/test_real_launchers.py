"""slurm.sbatch on a real Slurm with two machines, and two_boxes.sh on a real ssh, with power cuts and Ctrl-C."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from tests.conftest import MakeRun, complete
from tests.launch import wait_until
from tests.machines import Machine, Machines
from tests.walks import children, end, final_hash, last_step, processes, starts
from training.telemetry.metrics_log import read_metrics

TIMEOUT = 20
KEYS = {
    "min_train_tokens": 1000 * 8 * 32,
    "max_epochs": 100,
    "checkpoint_interval": 10,
    "validation_interval": None,
    "timeout_seconds": TIMEOUT,
}
# This configuration tells Slurm that some ordinary files are GPUs.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=a(10.77.0.1)
AuthType=auth/none
AuthInfo=cred_expire=20
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SlurmUser=root
SlurmdTimeout=20
ReturnToService=2
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=a NodeAddr=10.77.0.1 CPUs=2 Gres=gpu:8
NodeName=b NodeAddr=10.77.0.2 CPUs=2 Gres=gpu:8
PartitionName=all Nodes=a,b Default=YES
"""


@attrs.frozen
class Cluster:
    """Slurm on two machines. The controller runs on the first machine."""

    machines: Machines
    environment: dict[str, str]
    daemons: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def start(self, daemon: str, machine: Machine) -> None:
        self.daemons.append(machine.start(daemon, "-D", environment=self.environment))

    def call(self, *command: str) -> str:
        """Run a Slurm command, and return its output."""
        process = self.machines[0].start(*command, environment=self.environment)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output.strip()

    def submit(self, run: Path, *options: str) -> str:
        """Submit launch/slurm.sbatch, and return the number of the job."""
        log = run.with_suffix(".log")
        return self.call("sbatch", "--parsable", f"--output={log}", "launch/slurm.sbatch", str(run), *options)

    def ended(self, job: str) -> bool:
        return any(
            f"JobState={state} " in self.call("scontrol", "show", "job", job) for state in ("COMPLETED", "FAILED")
        )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_slurm_requeues_a_job_after_a_power_cut(make_run: MakeRun, machines: Machines) -> None:
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    with slurm(machines) as cluster:
        wait_until(lambda: cluster.call("sinfo", "--noheader", "--format=%D %t") == "2 idle", seconds=60)
        wrong = cluster.submit(run, "--set", "checkpoint_intervals=1")
        wait_until(lambda: cluster.ended(wrong), seconds=120)
        assert "JobState=FAILED" in cluster.call("scontrol", "show", "job", wrong)
        assert "Restarts=0" in cluster.call("scontrol", "show", "job", wrong)
        job = cluster.submit(run)
        wait_until(lambda: last_step(run)[0] > 20, seconds=120)
        machines[1].plug(cable=False)
        end(cluster.daemons[-1])
        wait_until(lambda: not processes(run), seconds=TIMEOUT / 2 + 30)
        wait_until(lambda: len(starts(run)) == 2, seconds=300)
        machines[1].plug(cable=True)
        cluster.start("slurmd", machines[1])
        wait_until(lambda: "State=IDLE" in cluster.call("scontrol", "show", "node", "b"), seconds=60)
        cluster.call("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: cluster.ended(job), seconds=400)
        assert "JobState=COMPLETED" in cluster.call("scontrol", "show", "job", job)
    complete(alone)
    assert starts(run) == [2, 1, 2]
    assert [record["reason"] for record in read_metrics(run) if record.get("event") == "stopped"] == ["signal"]
    assert final_hash(run) == final_hash(alone)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_boxes_continue_without_the_first_box(make_run: MakeRun, machines: Machines) -> None:
    keys = KEYS | {"min_train_tokens": 2000 * 8 * 32}
    alone, run, disk = make_run("alone", **keys), make_run("run", **keys), machines[1].disk
    write_ssh_files(machines[0].folder)
    servers = [serve_ssh(machine, run) for machine in machines]
    loops = [loop(machines[1], run)]
    try:
        wait_until(lambda: last_step(run)[0] > 20, seconds=180)
        machines[0].plug(cable=False)
        end(servers[0])
        wait_until(lambda: not processes(run), seconds=TIMEOUT / 2 + 30)
        wait_until(lambda: last_step(disk)[0] > 20, seconds=180)
        end(loops[0])
        machines[0].plug(cable=True)
        servers[0] = serve_ssh(machines[0], run)
        loops.append(loop(machines[1], run))
        assert loops[1].stdout is not None and "running: 10.77.0.2," in loops[1].stdout.readline()
        # This stands for Ctrl-C. The signal is not SIGINT, because a shell ignores SIGINT if its parent does.
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
    complete(alone)
    assert starts(run) == [2, 2] and starts(disk) == [1]
    assert final_hash(run) == final_hash(disk) == final_hash(alone)


@contextmanager
def slurm(machines: Machines) -> Iterator[Cluster]:
    """Run Slurm on both machines, or skip the test."""
    absent = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}: apt-get install slurm-wlm")
    folder = machines[0].folder / "slurm"
    folder.mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):
        (folder / f"gpu{number}").touch()
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PET_NPROC_PER_NODE": "1"}
    cluster = Cluster(machines, environment)
    try:
        for daemon, machine in (("slurmctld", machines[0]), ("slurmd", machines[0]), ("slurmd", machines[1])):
            cluster.start(daemon, machine)
        yield cluster
    finally:
        for process in cluster.daemons:
            if process.poll() is None:
                end(process)


def write_ssh_files(folder: Path) -> None:
    """Write a key, and an `ssh` command that uses the key. Skip the test if there is no sshd."""
    if shutil.which("sshd") is None or not shutil.which("ssh-keygen"):
        pytest.skip("needs sshd: apt-get install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(folder / "key")], check=True)
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    options = "-F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} -i {folder}/key "$@"\n')
    ssh.chmod(0o755)


def serve_ssh(machine: Machine, run: Path) -> subprocess.Popen[str]:
    """Start sshd, which is the parent of all processes on the machine. The second machine has a separate disk."""
    key = machine.folder / "key"
    options = ("-h", str(key), "-o", f"AuthorizedKeysFile={key}.pub", "-o", "StrictModes=no", "-o", "PidFile=none")
    sshd = (str(shutil.which("sshd")), "-D", "-e", "-f", "/dev/null", *options)
    server = machine.start(*sshd, own_disk=run if machine.name == "b" else None)
    assert server.stderr is not None and "listening" in server.stderr.readline()
    return server


def loop(machine: Machine, run: Path) -> subprocess.Popen[str]:
    environment = {"PATH": f"{machine.folder}/bin:{os.environ['PATH']}", "RANKS": "1"}
    return machine.start("launch/two_boxes.sh", str(run), "10.77.0.1", "10.77.0.2", environment=environment)
