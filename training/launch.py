"""Launch environment: what torchrun tells a process through environment variables."""

import os
import socket
import time
from pathlib import Path

from common.errors import BadInput

# Nodes of a job, where its launcher tells: Slurm (of a step, of the whole job), SkyPilot, Kubernetes' training
# operators (for torchrun: may be a range, "1:4").
NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SKYPILOT_NUM_NODES", "PET_NNODES")


def environment_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def environment_local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def environment_nodes() -> int:
    """Return how many nodes have met, by torchrun's word; else how often the ranks of this one go into all.

    Two torchruns on one machine are two nodes.
    """
    if "RANK" not in os.environ:
        return 1
    groups = os.environ.get("GROUP_WORLD_SIZE")
    return int(groups) if groups else -(-environment_world_size() // environment_local_world_size())


def check_nodes() -> None:
    """Raise BadInput where the launcher's environment has more nodes than have met: each would train alone."""
    nodes = environment_nodes()
    for variable in NODE_COUNTS:
        least = os.environ.get(variable, "").partition(":")[0]
        if not least.isdecimal():
            continue
        if int(least) > nodes:
            raise BadInput(
                f"{variable} is {os.environ[variable]}, but {nodes} {'node has' if nodes == 1 else 'nodes have'} met; "
                f"start torchrun on every node with --nnodes {least} and one --master-addr, or set {variable}={nodes} "
                "if that is meant"
            )
        return


def torchrun_job() -> str | None:
    """Return torchrun's name of the job, the same for each group of ranks that it restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restarts() -> int:
    """Return how often torchrun --max-restarts has restarted this group of ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def will_restart() -> bool:
    """Tell whether torchrun --max-restarts will restart this group of ranks if one fails."""
    return restarts() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def torchrun_process() -> int | None:
    """Return the process of torchrun that started this one; None without, or where the system does not tell (/proc)."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    named = b"torchrun" in command or b"torch.distributed.run" in command
    return os.getppid() if named and torchrun_job() is not None else None


def torchrun_identity() -> str | None:
    """Return what tells the torchrun that started this process from all others, on any machine; None without."""
    if (job := torchrun_job()) is None:
        return None
    try:
        began = str(_started_ticks(os.getppid()))
    except OSError:
        began = "unknown"
    return f"{job} {socket.gethostname()} {os.getppid()} {began}"


def job_seconds() -> float:
    """Return the age of the job: of this process, or of the torchrun that started it for the first time.

    0.0 where the system does not tell (it is read from Linux's /proc).
    """
    launcher = torchrun_process() if restarts() == 0 else None
    try:
        ticks = _started_ticks(os.getpid() if launcher is None else launcher)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _started_ticks(process: int) -> int:
    """Return when a process began, in clock ticks since the machine's start. Raises OSError without /proc."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[22 - 3])  # from the third field on
