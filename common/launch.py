"""The launch environment: the variables that torchrun, or another launcher, sets for a process."""

import json
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import EXIT_DONE, EXIT_STOPPED, REASONS, BadInput, Reason
from common.files import replace_file
from common.json_files import parse_json
from common.redaction import redacted
from common.text import integer_range, quoted

# Variables that contain the number of nodes of a job. Slurm sets the first one for a job step (srun), and the second
# one for the complete job. SkyPilot sets the third one. The training operators of Kubernetes set the last one for
# torchrun; its value may be a range, such as "1:4".
NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SKYPILOT_NUM_NODES", "PET_NNODES")
# Variables that contain the number of tasks that a launcher starts for one command. In this order, the launchers are
# Slurm, Open MPI, MPICH and Intel MPI (PMI_SIZE for all nodes, MPI_LOCALNRANKS for this node), MVAPICH, Flux, and LSF's
# jsrun.
TASK_COUNTS = (
    *("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE"),
    *("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE"),
)
OF_ANOTHER_RANK: tuple[Reason, ...] = ("lost-rank", "failed-rank")  # why a rank ended after another rank failed
JOB_VARIABLE = "LOCKSTEP_JOB"  # identity of a job, chosen by the command that has started it
# This variable shows where the user sets the keys of this job: in an experiment's file if the variable has the value
# SETTINGS_OF_EXPERIMENT, otherwise on the command line.
SETTINGS_VARIABLE = "LOCKSTEP_SETTINGS"
SETTINGS_OF_EXPERIMENT = "experiment"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
COUNTS, SIZES, PORTS = range(1 << 20), range(1, 1 << 20), range(1, 1 << 16)
NUMBERS = dict.fromkeys(("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), COUNTS)
NUMBERS |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), SIZES) | {"MASTER_PORT": PORTS}


def check_environment() -> None:
    """Raise BadInput if the variables of a rank are not numbers, or contradict each other.

    Every process prints its own error.
    """
    values: dict[str, int] = {}
    for name, allowed in NUMBERS.items():
        if (text := os.environ.get(name)) is None:
            continue
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in allowed:
            bounds = integer_range(allowed.start, allowed.stop - 1)
            raise BadInput(f"{name} is {quoted(text)}, wanted a whole number {bounds}; torchrun sets it", alone=True)
        values[name] = int(text)
    if problem := _contradiction(values):
        advice = "start torchrun, which sets all of them, or unset them to run a single process"
        raise BadInput(f"{problem}; {advice}", alone=True)


def without_launcher() -> dict[str, str]:
    """Return this process's environment without the variables of a rank, to start an independent job or process."""
    names = {*NUMBERS, "MASTER_ADDR", "GROUP_RANK", JOB_VARIABLE, SETTINGS_VARIABLE}
    prefixes = ("TORCHELASTIC_", "ROLE_")
    return {name: text for name, text in os.environ.items() if name not in names and not name.startswith(prefixes)}


def setting(**keys: Any) -> str:
    """Return what the user of this job would write to set keys of train.json.

    This is `--set KEY=VALUE` or, if an experiment has started the job, an entry of the experiment's file.
    """
    if os.environ.get(SETTINGS_VARIABLE) == SETTINGS_OF_EXPERIMENT:
        return f'"set": {json.dumps({f"train.{key}": value for key, value in keys.items()})}'
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in keys.items())
    return " ".join(f"--set {key}={text}" for key, text in texts)


def environment_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_first_on_machine() -> bool:
    """Return whether this is the first rank on its machine. Without a launcher, it always is."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def environment_local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def environment_nodes() -> int:
    """Return the number of nodes that have joined the job, as torchrun counts them.

    Two torchruns on the same machine count as two nodes.
    """
    if "RANK" not in os.environ:
        return 1
    groups = os.environ.get("GROUP_WORLD_SIZE")
    return int(groups) if groups else -(-environment_world_size() // environment_local_world_size())


def check_launcher() -> None:
    """Raise BadInput unless all nodes of the launcher, and all tasks that it has started, have joined this job.

    Without this check, each node or task would train separately.
    """
    nodes = environment_nodes()
    for variable in NODE_COUNTS:
        minimum = os.environ.get(variable, "").partition(":")[0]
        if not minimum.isdecimal():
            continue
        if int(minimum) > nodes:
            joined = f"{nodes} {'node has' if nodes == 1 else 'nodes have'} joined"
            raise BadInput(
                f"{variable} is {os.environ[variable]}, but only {joined}; start torchrun on every node with "
                f"--nnodes {minimum} and the same --master-addr, or set {variable}={nodes} to train without the other "
                "nodes"
            )
        break
    variables, tasks = list(TASK_COUNTS), environment_world_size() if torchrun_job() is None else nodes
    # Outside a job step (srun), SLURM_NTASKS may count tasks that the batch script or shell has not started yet.
    if variables[0] not in os.environ and "SLURM_PROCID" in os.environ and os.environ.get("ENVIRONMENT") != "BATCH":
        variables.append("SLURM_NTASKS")
    for variable in variables:
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > tasks:
            joined = f"{tasks} {'task has' if tasks == 1 else 'tasks have'} joined"
            raise BadInput(
                f"{variable} is {count}, but only {joined}, so each task would train alone; start one task per node "
                f"and run torchrun --nproc_per_node in it, or set {variable}={tasks} to let each task train alone"
            )


def torchrun_job() -> str | None:
    """Return torchrun's name for the job, or None without torchrun.

    The name stays the same when torchrun restarts the ranks.
    """
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restarts() -> int:
    """Return how many times torchrun --max-restarts has restarted this group of ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def torchrun_process() -> int | None:
    """Return the id of the torchrun process that started this one.

    Return None without torchrun, or if the system has no /proc.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    is_torchrun = b"torchrun" in command or b"torch.distributed.run" in command
    return os.getppid() if is_torchrun and torchrun_job() is not None else None


class Failure(NamedTuple):
    """Why a rank ended. It is this rank, or another rank of this machine that reported its end to torchrun."""

    status: int
    reason: Reason
    problem: str = ""


def tell_torchrun(message: str, status: int, reason: Reason) -> None:
    """Report to torchrun why this rank ends.

    torchrun shows the message in its table of failed ranks, and the other ranks read it with `failure_of_another`.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        record = {"message": redacted(message), "timestamp": int(time.time()), "status": status, "reason": reason}
        with suppress(OSError):
            replace_file(Path(path), json.dumps(record))


def failure_of_another() -> Failure | None:
    """Return the failure that another rank of this machine has reported to torchrun; None if there is no report.

    torchrun gives each rank of a group a folder for its report, and these folders are next to each other. A rank writes
    its report before it ends, so the report exists before torchrun asks the other ranks to stop. If several ranks have
    failed, a failure that was not caused by another rank is preferred.
    """
    path, failures = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull), list[Failure]()
    for file in sorted(path.parent.parent.glob(f"*/{path.name}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = parse_json(file.read_bytes())
            message = str(record["message"]).strip()
            # The message of a crash is a traceback, whose last line is the error.
            problem = message.rpartition("\n")[2] if record["reason"] == "crash" else message
            failure = Failure(int(record["status"]), record["reason"], problem)
            if file != path and failure.status not in (EXIT_DONE, EXIT_STOPPED) and failure.reason in REASONS:
                failures.append(failure)
    return min(failures, key=lambda failure: failure.reason in OF_ANOTHER_RANK, default=None)


def torchrun_identity() -> str | None:
    """Return an identity of the torchrun that launched this process, unique across machines; None without torchrun."""
    if (job := torchrun_job()) is None:
        return None
    try:
        start_ticks = str(_started_ticks(os.getppid()))
    except OSError:
        start_ticks = "unknown"
    return f"{job} {socket.gethostname()} {os.getppid()} {start_ticks}"


def boot_id() -> str:
    """Return the identity of this machine's last boot; "" if the system does not provide it."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def machine_identity() -> str:
    """Return an identity of this machine that changes at each boot, because a boot may change the clock."""
    return f"{socket.gethostname()} {boot_id()}".strip()


def job_identity() -> str:
    """Return the identity of this process's job, unique across machines and over time.

    If the launcher has not chosen an identity, the identity of torchrun is returned or, without torchrun, the identity
    of this process. The job's identity stays the same when torchrun restarts the ranks.
    """
    if identity := os.environ.get(JOB_VARIABLE):
        return identity
    try:
        start_ticks = str(_started_ticks(os.getpid()))
    except OSError:
        start_ticks = "unknown"
    return torchrun_identity() or f"{socket.gethostname()} {os.getpid()} {start_ticks}"


def job_seconds() -> float:
    """Return the age of this job in seconds; 0.0 without Linux's /proc.

    The job is as old as the torchrun that started this process. Without torchrun, or after a restart by torchrun, this
    process's own age is returned.
    """
    launcher = torchrun_process() if restarts() == 0 else None
    try:
        ticks = _started_ticks(os.getpid() if launcher is None else launcher)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _started_ticks(process: int) -> int:
    """Return the start of a process in clock ticks since the machine's boot. Raises OSError without /proc."""
    # The start is field 22. The text after the last ")" begins with field 3.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[22 - 3])


def _contradiction(values: dict[str, int]) -> str | None:
    """Return a message about a rank's variable that is missing or contradicts another variable; None if all is well."""
    if "RANK" not in values:
        defaults = {"WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        settings = [
            f"{name} is {values[name]}" for name in defaults if values.get(name, defaults[name]) != defaults[name]
        ]
        return f"{settings[0]}, but RANK is not set" if settings else None
    required = ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    required += ["LOCAL_RANK"] if values.get("WORLD_SIZE", 1) > 1 else []
    if missing := [name for name in required if not os.environ.get(name)]:
        return f"RANK is {values['RANK']}, but {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set"
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values.get(name, 0) >= values.get(limit, SIZES.stop):
            return f"{name} is {values[name]}, wanted less than {limit}, which is {values[limit]}"
    return None
