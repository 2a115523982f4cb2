"""Who am I among the processes of this job, and how do all of us agree on something.

Collectives on the default group move device tensors (NCCL on GPUs, gloo on CPUs). Python objects and the wish to stop
go over `control`, a gloo group; while one rank of a machine downloads, the others wait on `download`, which has hours.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from errors import BadInput

DOWNLOAD_TIMEOUT = timedelta(hours=6)  # tens of gigabytes on a slow line
# NCCL's own watchdog ends the process without a word to Python: gloo, where every step meets as well, gives up first.
NCCL_EXTRA = timedelta(minutes=1)

Value = TypeVar("Value")


@attrs.frozen(kw_only=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    world_size: int
    local_rank: int  # on this machine; picks the GPU
    local_world_size: int
    device: torch.device
    control: Any  # dist.ProcessGroup
    download: Any  # likewise

    @property
    def coordinates(self) -> bool:
        """True on the rank that writes files and speaks to the user."""
        return self.rank == 0


def environment_world_size() -> int:
    """Return the world size that torchrun set, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    """Return the rank that torchrun set, or 0."""
    return int(os.environ.get("RANK", "0"))


def start(device_kind: str | None, timeout_seconds: int) -> Ranks:
    """Join the process group that torchrun describes, or a group of one. `device_kind`: "cuda", "cpu" or None.

    A collective raises RuntimeError when it has waited for `timeout_seconds`.
    Raises BadInput when there is no GPU for this rank.
    """
    if device_kind is None:
        device_kind = "cuda" if torch.cuda.is_available() else "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_seconds)
    options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    device = torch.device("cpu")
    if device_kind == "cuda":
        available = torch.cuda.device_count()
        if local_world_size > available:
            raise BadInput(
                f"--device cuda: got {available} GPUs for {local_world_size} ranks on this machine; "
                f"start torchrun with --nproc_per_node={available or 1}" + ("" if available else " --device cpu")
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        options.update(backend="cpu:gloo,cuda:nccl", device_id=device, timeout=timeout + NCCL_EXTRA)
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]  # missing from its __all__
        options.update(store=store, rank=0, world_size=1)
    dist.init_process_group(**options)
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
        download=dist.new_group(backend="gloo", timeout=DOWNLOAD_TIMEOUT),
    )


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(ranks: Ranks, value: Value, group: Any = None) -> list[Value]:
    """Return every rank's value, in rank order, on every rank; over `control` unless told otherwise."""
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=group or ranks.control)
    return values


def from_coordinator(ranks: Ranks, make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0 while the others wait; return its value, or raise its BadInput, on every rank."""
    return together(ranks, make, only=ranks.coordinates)[0]


def together(ranks: Ranks, work: Callable[[], Value], *, only: bool = True, group: Any = None) -> list[Value]:
    """Call `work` on the ranks where `only` is true; return their values in rank order, on every rank.

    A BadInput on any rank is raised on all of them, the lowest rank's first, so that nobody waits for the dead.
    """
    value: Any = None
    problem: str | None = None
    if only:
        try:
            value = work()
        except BadInput as error:
            problem = str(error)
    outcomes = gather(ranks, (only, value, problem), group)
    for _, _, message in outcomes:
        if message is not None:
            raise BadInput(message)
    return [result for took_part, result, _ in outcomes if took_part]


class StopRequest:
    """A signal's wish to stop early, agreed on by all ranks between two steps."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._asked = False

    def ask(self) -> None:
        """Ask this rank to stop. Safe to call from a signal handler."""
        self._asked = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """While inside, SIGINT and SIGTERM ask to stop instead of ending the process."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: self.ask()) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def agreed(self) -> bool:
        """Tell whether any rank was asked. All ranks call it at the same step and get the same answer."""
        flag = torch.tensor([float(self._asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.control)
        return bool(flag.item())
