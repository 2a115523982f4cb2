"""Training jobs of an experiment: options, devices, and the command of a job."""

import os
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import option
from common.checks import integer
from common.errors import BadInput
from common.output import Notice, note
from common.text import dollars, either
from training.command import WORLD_SIZE, Device
from training.telemetry.budget import MOST_HOURS, USD, Budget

ROOT = Path(__file__).parents[2]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class PoolOptions:
    """Options of an experiment's training jobs. The budget counts earlier calls of the same experiment."""

    at_once: Annotated[
        int | None,
        option(
            "runs side by side; default: as many as the GPUs, or on a CPU the cores, hold",
            "K",
            check=integer(1, 1 << 16),
        ),
    ] = None
    ranks: Annotated[int, option("ranks of each run, under torchrun", "R", check=WORLD_SIZE)] = 1
    device: Device = None
    price_per_hour: Annotated[float | None, option("price of the machine", "USD", check=USD)] = None
    budget: Budget = attrs.field(factory=Budget)


@attrs.frozen
class PoolDevices:
    """Devices, and how many jobs share them, each with as many as it has ranks."""

    gpus: list[str]  # numbers, as CUDA_VISIBLE_DEVICES has them; none on a CPU
    at_once: int
    ranks: int

    @classmethod
    def of(cls, options: PoolOptions) -> "PoolDevices":
        """Return the devices of this machine. Raises BadInput where it has too few."""
        gpus, ranks = _gpus(options.device), options.ranks
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        at_once = options.at_once or max(1, (len(gpus) or cores) // ranks)
        if gpus and at_once * ranks > len(gpus):
            raise BadInput(f"--at-once {at_once} x --ranks {ranks}: this machine has {len(gpus)} GPUs")
        return cls(gpus, at_once, ranks)

    def free(self, taken: list[list[str]]) -> list[str] | None:
        """Return the devices of one more job beside those that jobs have taken; None where there are too few."""
        places = self.gpus or [str(place) for place in range(self.at_once * self.ranks)]
        left = [place for place in places if not any(place in devices for devices in taken)]
        return left[: self.ranks] if len(taken) < self.at_once and len(left) >= self.ranks else None

    def environment(self, devices: list[str]) -> dict[str, str]:
        """Return the environment variables of a job that has these devices."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if self.gpus else {"OMP_NUM_THREADS": "1"}


def describe_jobs(options: PoolOptions) -> list[str | Notice]:
    """Return how this machine would train the runs, for --dry-run: side by side, and within which limits."""
    lines, budget = list[str | Notice](), options.budget
    try:
        devices = PoolDevices.of(options)
        ranks = f"{devices.ranks} rank{'s' * (devices.ranks > 1)}"
        where = f"{len(devices.gpus)} GPU{'s' * (len(devices.gpus) > 1)}" if devices.gpus else "the CPU"
        lines.append(f"at most {devices.at_once} at a time, each with {ranks}, on {where} of this machine")
    except BadInput as error:
        lines.append(note(str(error)))
    limits = [] if budget.max_hours is None else [f"{budget.max_hours:g} hours"]
    limits += [] if budget.max_usd is None else [dollars(budget.max_usd)]
    if limits:
        lines.append(f"stops before {either(limits)}, earlier calls of this experiment included")
    return lines


def train_command(
    directory: Path,
    options: PoolOptions,
    *,
    until_step: int | None = None,
    hours: float | None = None,
    code: Path = ROOT,
) -> list[str]:
    """Return the arguments of Python that train a run with the train.py of `code`, under torchrun on several ranks."""
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
