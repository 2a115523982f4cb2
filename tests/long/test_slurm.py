"""launch/slurm.sbatch on a real Slurm of two machines: an error, a power cut, a notice before the time limit."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from tests.conftest import train
from tests.long.test_node_kills import end
from tests.machines import Machine
from tests.walks import final_hash, last_step
from training.telemetry.metrics_log import read_metrics

TIMEOUT = 20
KEYS = {
    "min_train_tokens": 1000 * 8 * 32,
    "max_epochs": 100,
    "checkpoint_interval": 10,
    "validation_interval": None,
    "timeout_seconds": TIMEOUT,
}
# GPUs are files.
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
    """Slurm on two machines; its controller on the first."""

    machines: tuple[Machine, Machine]
    environment: dict[str, str]
    daemons: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def start(self, daemon: str, machine: Machine) -> None:
        self.daemons.append(machine.start(daemon, "-D", environment=self.environment))

    def call(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        process = self.machines[0].start(*command, environment=self.environment)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output.strip()

    def submit(self, run: Path, *options: str) -> str:
        """Submit the repository's file; return the job's number."""
        log = run.with_suffix(".log")
        return self.call("sbatch", "--parsable", f"--output={log}", "launch/slurm.sbatch", str(run), *options)

    def ended(self, job: str) -> bool:
        return any(
            f"JobState={state} " in self.call("scontrol", "show", "job", job) for state in ("COMPLETED", "FAILED")
        )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_is_requeued_after_a_power_cut_and_before_its_time_limit(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine]
) -> None:
    alone, run = make_run("alone", **KEYS), make_run("run", **KEYS)
    with slurm(machines) as cluster:
        wait_for(lambda: cluster.call("sinfo", "--noheader", "--format=%D %t") == "2 idle", 60)
        wrong = cluster.submit(run, "--set", "checkpoint_intervals=1")
        wait_for(lambda: cluster.ended(wrong), 120)
        assert "JobState=FAILED" in cluster.call("scontrol", "show", "job", wrong)
        assert "Restarts=0" in cluster.call("scontrol", "show", "job", wrong)
        job = cluster.submit(run)
        wait_for(lambda: last_step(run)[0] > 20, 120)
        machines[1].plug(cable=False)
        end(cluster.daemons[-1])
        wait_for(lambda: not processes(run), TIMEOUT / 2 + 30)
        wait_for(lambda: len(starts(run)) == 2, 300)
        machines[1].plug(cable=True)
        cluster.start("slurmd", machines[1])
        wait_for(lambda: "State=IDLE" in cluster.call("scontrol", "show", "node", "b"), 60)
        cluster.call("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: cluster.ended(job), 400)
        assert "JobState=COMPLETED" in cluster.call("scontrol", "show", "job", job)
    assert train(alone).returncode == 0
    assert starts(run) == [2, 1, 2]
    assert [record["reason"] for record in read_metrics(run) if record.get("event") == "stopped"] == ["signal"]
    assert final_hash(run) == final_hash(alone)


@contextmanager
def slurm(machines: tuple[Machine, Machine]) -> Iterator[Cluster]:
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


def wait_for(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes(run: Path) -> str:
    """Return the process ids of the run's torchruns and ranks."""
    return subprocess.run(["pgrep", "-f", f"train.py {run}"], capture_output=True, text=True, check=False).stdout


def starts(run: Path) -> list[int]:
    """Return the world size of each start."""
    return [record["world_size"] for record in read_metrics(run) if record.get("event") == "start"]
