"""The training jobs of an experiment: their options, their devices, and the command of a job."""

import os
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import option
from common.checks import integer
from common.errors import BadInput
from common.output import Notice, note
from common.text import counted, dollars, either
from training.command import WORLD_SIZE, Device
from training.telemetry.budget import MOST_HOURS, USD, Budget

ROOT = Path(__file__).parents[2]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class PoolOptions:
    """Options of an experiment's training jobs."""

    at_once: Annotated[
        int | None,
        option(
            "train K runs at a time; default: as many as fit on the GPUs, or on the cores of a CPU",
            "K",
            check=integer(1, 1 << 16),
        ),
    ] = None
    ranks: Annotated[int, option("number of ranks of each run, started by torchrun", "R", check=WORLD_SIZE)] = 1
    device: Device = None
    price_per_hour: Annotated[float | None, option("price of the machine per hour", "USD", check=USD)] = None
    budget: Budget = attrs.field(factory=Budget)


@attrs.frozen
class PoolDevices:
    """The devices of this machine, the number of jobs that run on them at a time, and the ranks of each job."""

    gpus: list[str]  # GPU numbers, as in CUDA_VISIBLE_DEVICES; empty on a CPU
    at_once: int
    ranks: int  # ranks of each job; each rank has one device

    @classmethod
    def of(cls, options: PoolOptions) -> "PoolDevices":
        """Return the devices of this machine. Raise BadInput if there are too few."""
        gpus, ranks = _gpus(options.device), options.ranks
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        at_once = options.at_once or max(1, (len(gpus) or cores) // ranks)
        if gpus and at_once * ranks > len(gpus):
            raise BadInput(
                f"--at-once {at_once} x --ranks {ranks}: needs {at_once * ranks} GPUs, but this machine has {len(gpus)}"
            )
        return cls(gpus, at_once, ranks)

    def free(self, used: list[list[str]]) -> list[str] | None:
        """Return the devices for one more job, or None if there are too few. `used` has each job's devices."""
        slots = self.gpus or [str(slot) for slot in range(self.at_once * self.ranks)]
        free_slots = [slot for slot in slots if not any(slot in devices for devices in used)]
        return free_slots[: self.ranks] if len(used) < self.at_once and len(free_slots) >= self.ranks else None

    def environment(self, devices: list[str]) -> dict[str, str]:
        """Return the environment variables of a job that has these devices."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if self.gpus else {"OMP_NUM_THREADS": "1"}


def describe_jobs(options: PoolOptions) -> list[str | Notice]:
    """Return lines for --dry-run: the number of runs that this machine would train at a time, and the limits."""
    lines, budget = list[str | Notice](), options.budget
    try:
        devices = PoolDevices.of(options)
        ranks = counted(devices.ranks, "rank")
        where = counted(len(devices.gpus), "GPU") if devices.gpus else "the CPU"
        lines.append(f"at most {devices.at_once} at a time, each with {ranks}, on {where} of this machine")
    except BadInput as error:
        lines.append(note(str(error)))
    limits = [] if budget.max_hours is None else [f"{budget.max_hours:g} hours"]
    limits += [] if budget.max_usd is None else [dollars(budget.max_usd)]
    if limits:
        lines.append(f"stops before the total of all calls for this experiment exceeds {either(limits)}")
    return lines


def train_command(
    directory: Path,
    options: PoolOptions,
    *,
    until_step: int | None = None,
    hours: float | None = None,
    code: Path = ROOT,
) -> list[str]:
    """Return the arguments that Python needs to train a run with the train.py in `code`.

    With several ranks, the job runs under torchrun. `hours` limits the total time of all jobs of the run.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command = [*(torchrun if options.ranks > 1 else []), str(code / "train.py"), str(directory)]
    if options.device is not None:
        command += ["--device", options.device]
    if until_step is not None:
        command += ["--max-steps", str(until_step)]
    if hours is not None:
        command += ["--max-hours", repr(min(hours, MOST_HOURS / 2))]
    return command


def _gpus(device: str | None) -> list[str]:
    from training.hardware.usable_gpus import choose_device

    if choose_device(device) == "cpu":
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
