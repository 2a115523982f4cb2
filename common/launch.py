"""Launch environment: variables that torchrun, or another launcher, sets for a process."""

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

# Nodes of a job, where its launcher tells: Slurm (of a step, of the whole job), SkyPilot, Kubernetes' training
# operators (for torchrun: may be a range, "1:4").
NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SKYPILOT_NUM_NODES", "PET_NNODES")
# Tasks that a launcher starts of one command: Slurm, Open MPI, MPICH and Intel MPI (in all, on this node), MVAPICH,
# Flux, jsrun of LSF.
TASK_COUNTS = (
    *("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE"),
    *("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE"),
)
OF_ANOTHER_RANK: tuple[Reason, ...] = ("lost-rank", "failed-rank")  # reasons of a rank whose cause is another one
JOB_VARIABLE = "LOCKSTEP_JOB"  # identity of a job, chosen by the command that has started it
SETTINGS_VARIABLE = "LOCKSTEP_SETTINGS"  # where the user of the job gives keys: on the command line, unless it is set
SETTINGS_OF_EXPERIMENT = "experiment"  # in the file of an experiment
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
COUNTS, SIZES, PORTS = range(1 << 20), range(1, 1 << 20), range(1, 1 << 16)
NUMBERS = dict.fromkeys(("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), COUNTS)
NUMBERS |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), SIZES) | {"MASTER_PORT": PORTS}


def check_environment() -> None:
    """Raise BadInput, for each process to print, where the variables of a rank are no numbers, or contradict others."""
    values: dict[str, int] = {}
    for name, allowed in NUMBERS.items():
        if (text := os.environ.get(name)) is None:
            continue
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in allowed:
            wanted = integer_range(allowed.start, allowed.stop - 1)
            raise BadInput(f"{name} is {quoted(text)}, wanted a whole number {wanted}; torchrun sets it", alone=True)
        values[name] = int(text)
    if problem := _contradiction(values):
        raise BadInput(f"{problem}; start torchrun, which sets all, or unset them to run on one process", alone=True)


def without_launcher() -> dict[str, str]:
    """Return the environment without the variables of a rank, for a job or a process of its own."""
    ranks, prefixes = (
        {*NUMBERS, "MASTER_ADDR", "GROUP_RANK", JOB_VARIABLE, SETTINGS_VARIABLE},
        ("TORCHELASTIC_", "ROLE_"),
    )
    return {name: text for name, text in os.environ.items() if name not in ranks and not name.startswith(prefixes)}


def setting(**keys: Any) -> str:
    """Return keys of train.json as whoever has started this job gives them: with --set, or in an experiment's file."""
    if os.environ.get(SETTINGS_VARIABLE) == SETTINGS_OF_EXPERIMENT:
        return f'"set": {json.dumps({f"train.{key}": value for key, value in keys.items()})}'
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in keys.items())
    return " ".join(f"--set {key}={text}" for key, text in texts)


def environment_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_first_on_machine() -> bool:
    """Return True for the first rank of its machine, and without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def environment_local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def environment_nodes() -> int:
    """Return the nodes that have met, by torchrun's word; two torchruns on one machine are two nodes."""
    if "RANK" not in os.environ:
        return 1
    groups = os.environ.get("GROUP_WORLD_SIZE")
    return int(groups) if groups else -(-environment_world_size() // environment_local_world_size())


def check_launcher() -> None:
    """Raise BadInput where the launcher has more nodes, or has started more tasks, than have met: all would train."""
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
        break
    tasks, met = list(TASK_COUNTS), environment_world_size() if torchrun_job() is None else nodes
    # Without a step, SLURM_NTASKS may count what a batch script, or a shell, is yet to start.
    if tasks[0] not in os.environ and "SLURM_PROCID" in os.environ and os.environ.get("ENVIRONMENT") != "BATCH":
        tasks.append("SLURM_NTASKS")
    for variable in tasks:
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > met:
            raise BadInput(
                f"{variable} is {count}, but {met} {'has' if met == 1 else 'have'} met: each task would train alone; "
                f"start one task on each node, torchrun --nproc_per_node, or set {variable}={met} if that is meant"
            )


def torchrun_job() -> str | None:
    """Return torchrun's name of the job, the same for each group of ranks that it restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restarts() -> int:
    """Return how often torchrun --max-restarts has restarted this group of ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def torchrun_process() -> int | None:
    """Return the process of torchrun that started this one; None without, or where the system does not tell (/proc)."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    named = b"torchrun" in command or b"torch.distributed.run" in command
    return os.getppid() if named and torchrun_job() is not None else None


class Failure(NamedTuple):
    """Why a rank ends; of another rank of this machine, as it has told torchrun."""

    status: int
    reason: Reason
    problem: str = ""


def tell_torchrun(message: str, status: int, reason: Reason) -> None:
    """Write why this rank ends for torchrun's table of failed ranks, and for the other ranks: `failure_of_another`."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        record = {"message": redacted(message), "timestamp": int(time.time()), "status": status, "reason": reason}
        with suppress(OSError):
            replace_file(Path(path), json.dumps(record))


def failure_of_another() -> Failure | None:
    """Return the failure of another rank of this machine that has told torchrun why it failed; None if none has.

    torchrun gives each rank of a group a folder next to the others' for this. A rank writes its reason before it ends,
    so it is there before torchrun asks the other ranks to stop. A rank that failed by itself comes before those that
    failed because of it.
    """
    path, failures = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull), list[Failure]()
    for file in sorted(path.parent.parent.glob(f"*/{path.name}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = parse_json(file.read_bytes())
            message = str(record["message"]).strip()
            problem = message.rpartition("\n")[2] if record["reason"] == "crash" else message  # a traceback's last line
            failure = Failure(int(record["status"]), record["reason"], problem)
            if file != path and failure.status not in (EXIT_DONE, EXIT_STOPPED) and failure.reason in REASONS:
                failures.append(failure)
    return min(failures, key=lambda failure: failure.reason in OF_ANOTHER_RANK, default=None)


def torchrun_identity() -> str | None:
    """Return the identity of the torchrun that launched this process, unique over machines; None without."""
    if (job := torchrun_job()) is None:
        return None
    try:
        began = str(_started_ticks(os.getppid()))
    except OSError:
        began = "unknown"
    return f"{job} {socket.gethostname()} {os.getppid()} {began}"


def boot_id() -> str:
    """Return the identity of this machine's last boot; "" if the system does not tell."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def machine_identity() -> str:
    """Return a name of this machine that no other has, and that it loses when it boots: its clock may jump then."""
    return f"{socket.gethostname()} {boot_id()}".strip()


def job_identity() -> str:
    """Return the identity of the job of this process: the one that its launcher chose, its torchrun's, or its own.

    It is unique over machines and times, and the same for all groups of ranks that one torchrun of a job restarts.
    """
    if chosen := os.environ.get(JOB_VARIABLE):
        return chosen
    try:
        began = str(_started_ticks(os.getpid()))
    except OSError:
        began = "unknown"
    return torchrun_identity() or f"{socket.gethostname()} {os.getpid()} {began}"


def job_seconds() -> float:
    """Return the age of this process, or of the torchrun that has first started it; 0.0 without Linux's /proc."""
    launcher = torchrun_process() if restarts() == 0 else None
    try:
        ticks = _started_ticks(os.getpid() if launcher is None else launcher)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _started_ticks(process: int) -> int:
    """Return when a process began, in clock ticks since the machine's start. Raises OSError without /proc."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[22 - 3])  # from the third field on


def _contradiction(values: dict[str, int]) -> str | None:
    """Return the contradiction among a rank's variables, by their values: one is missing or too large."""
    if "RANK" not in values:
        alone = {"WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        strays = [f"{name} is {values[name]}" for name, value in alone.items() if values.get(name, value) != value]
        return f"{strays[0]}, but RANK is not set" if strays else None
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *(["LOCAL_RANK"] if values.get("WORLD_SIZE", 1) > 1 else []))
    if missing := [name for name in needed if not os.environ.get(name)]:
        return f"RANK is {values['RANK']}, but {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set"
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values.get(name, 0) >= values.get(limit, SIZES.stop):
            return f"{name} is {values[name]}, wanted less than {limit}, {values[limit]}"
    return None
