"""Process groups, and collectives for Python objects.

The default group transfers tensors between devices (NCCL on GPUs, gloo on CPUs). `control`, a gloo group, transfers
Python objects and stop requests. `download` is another gloo group, with a timeout of hours, in which ranks wait while
their machine downloads files.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from common.errors import BadInput, joined, reason_of_system_error
from common.files import system_error
from common.launch import environment_local_world_size, environment_nodes, environment_rank, restarts, torchrun_job
from training.hardware.usable_gpus import choose_device, too_few_gpus, use_gpu

CONNECT_TIMEOUT = timedelta(seconds=10)  # for connecting to torchrun, which is already running when its ranks start
STORE_TIMEOUT = timedelta(minutes=30)  # torch's default, for ranks that are slow to start
DOWNLOAD_TIMEOUT = timedelta(hours=6)  # enough for tens of gigabytes on a slow connection
SAVE_TIMEOUT = timedelta(hours=2)  # longest wait for another rank's disk
# NCCL's watchdog kills the process without a Python exception. NCCL therefore gets a longer timeout than gloo, which is
# also used in every step and so times out first.
NCCL_EXTRA = timedelta(minutes=1)

# The first name was added in torch 2.13; earlier versions have only the second.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Value = TypeVar("Value")


@attrs.frozen(kw_only=True)
class RankGroup:
    """Ranks that share the global batch or the rows of a tensor, and this process's position among them."""

    rank: int  # 0 .. size - 1
    size: int
    group: Any = None  # dist.ProcessGroup, in the order of these ranks; None: the default group

    def chunk(self, rows: int) -> int:
        """Return the number of rows per shard, as in torch.chunk. The last shards may have fewer rows or none."""
        return -(-rows // self.size)

    def first_row(self, rows: int) -> int:
        """Return the index of this rank's first row in the complete tensor."""
        return min(self.rank * self.chunk(rows), rows)


ALONE = RankGroup(rank=0, size=1)


@attrs.frozen(kw_only=True)
class Ranks:
    rank: int
    world_size: int
    node: RankGroup = attrs.field()  # the ranks of this machine; they have no process group; node.rank selects the GPU
    data_parallel: RankGroup = attrs.field()  # ranks that get different parts of the global batch
    tensor: RankGroup = ALONE  # neighboring ranks that get the same batches and share each layer
    device: torch.device
    control: Any  # dist.ProcessGroup
    download: Any  # dist.ProcessGroup
    generation: str = "0"  # changes when torchrun restarts the processes

    @node.default
    @data_parallel.default
    def _all(self) -> RankGroup:
        return RankGroup(rank=self.rank, size=self.world_size)

    @property
    def coordinates(self) -> bool:
        """Whether this rank writes files and prints for the job."""
        return self.rank == 0


def start(device_kind: str | None, timeout_seconds: int, tensor_parallel: int = 1) -> Ranks:
    """Join torchrun's process group or, without torchrun, make a group with this single process.

    Afterwards, a collective that waits longer than `timeout_seconds` raises RuntimeError.

    Arguments:
        device_kind: "cuda", "cpu", or None to choose automatically
        timeout_seconds: time limit of each collective
        tensor_parallel: the key in train.json, which is the number of ranks that divide each layer

    Raises BadInput if this rank has no usable GPU, if nodes have different values of `tensor_parallel`, or if that
    value does not divide the number of ranks of a node. Raises dist.DistError if torchrun has ended.
    """
    device_kind = choose_device(device_kind)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = environment_local_world_size()
    timeout = timedelta(seconds=timeout_seconds)
    options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    device = torch.device("cpu")
    if device_kind == "cuda":
        available = torch.cuda.device_count()
        if local_world_size > available:
            raise BadInput(too_few_gpus(available, local_world_size))
        device = torch.device("cuda", local_rank)
        use_gpu(device)
        options.update(backend="cpu:gloo,cuda:nccl", device_id=device, timeout=timeout + NCCL_EXTRA)
    store, rank, world_size = _rendezvous()
    generation = str(restarts())
    if environment_nodes() > 1:
        from training.parallel.rendezvous import agree_on_generation, choose_interface

        generation = agree_on_generation(store, rank, world_size, STORE_TIMEOUT)
    # After a restart, the store may be the old one, with outdated addresses of the failed group.
    store = dist.PrefixStore(f"start {generation}", store)
    if environment_nodes() > 1:
        choose_interface(store, rank, world_size)
    store.set(f"layout {rank}", f"{tensor_parallel} {local_world_size}")
    # Every rank checks the layouts of all ranks, so that all of them raise the same error.
    for text in store.multi_get([f"layout {number}" for number in range(world_size)]):
        other_tensor_parallel, ranks_per_node = map(int, text.split())
        if other_tensor_parallel != tensor_parallel:
            raise BadInput(
                f"tensor_parallel: got {tensor_parallel} on this node and {other_tensor_parallel} on another node; "
                "copy the same train.json to all nodes"
            )
        if ranks_per_node % tensor_parallel:
            divisor = f"a divisor of {ranks_per_node}, the number of ranks per node"
            raise BadInput(
                f"tensor_parallel: got {tensor_parallel}, wanted {divisor}, because only links inside a node are fast"
            )
    dist.init_process_group(**options, store=store, rank=rank, world_size=world_size)
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        node=RankGroup(rank=local_rank, size=local_world_size),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
        download=dist.new_group(backend="gloo", timeout=DOWNLOAD_TIMEOUT),
        generation=generation,
        **groups_of(world_size, tensor_parallel),
    )


def groups_of(world_size: int, tensor_parallel: int) -> dict[str, Any]:
    """Return the groups for `Ranks.tensor` and `Ranks.data_parallel` if ranks share layers; otherwise return {}.

    Call it on every rank.
    """
    places = torch.arange(world_size).view(-1, tensor_parallel)
    return {} if tensor_parallel == 1 else {"tensor": make_subgroup(places), "data_parallel": make_subgroup(places.T)}


def make_subgroup(places: torch.Tensor) -> RankGroup:
    """Make a process group for each row of a matrix of ranks, and return the group that contains this process.

    The groups have the timeout of the default group. Call it on every rank.
    """
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    timeout = STORE_TIMEOUT if options is None else options._timeout  # a backend that never waits has no options
    groups = [(row, dist.new_group(row, timeout=timeout)) for row in places.tolist()]
    [(row, group)] = [(row, group) for row, group in groups if dist.get_rank() in row]
    return RankGroup(rank=row.index(dist.get_rank()), size=len(row), group=group)


def meet(device_kind: str | None, timeout_seconds: int) -> Ranks:
    """Join the process group as `start` does, but raise BadInput on this rank alone if torchrun does not answer."""
    try:
        return start(device_kind, timeout_seconds)
    except dist.DistError as error:
        raise rendezvous_error() from error


def torchrun_store() -> TCPStore:
    """Return a new connection to torchrun's store. Raises dist.DistError if torchrun has ended."""
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*server, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    store.set_timeout(STORE_TIMEOUT)
    return store


def rendezvous_error() -> BadInput:
    """Return the user error for a rank that could not connect to the other ranks."""
    partner = "another rank" if torchrun_job() is None else "torchrun"
    problem = f"{partner} has ended or does not answer; run the same command again"
    return BadInput(problem, alone=True, reason="lost-rank")


def collective_failed(error: BaseException | None) -> bool:
    """Return whether this error was raised by a collective, which means that another rank has ended or failed.

    Return False if any other code raised it. gloo raises plain RuntimeErrors, which can be recognized only by their
    text.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(ranks: Ranks, value: Value, group: Any = None) -> list[Value]:
    """All-gather a Python value: return the values of all ranks, in the order of ranks.

    The process group is `control`, unless `group` is given.
    """
    if ranks.world_size == 1:  # no process group is needed
        return [value]
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=group or ranks.control)
    return values


def gather_parts(ranks: Ranks, value: Value) -> list[Value]:
    """All-gather a Python value of each data-parallel rank, in the order of these ranks.

    Ranks that get the same batches must have the same value.
    """
    parts = dict(gather(ranks, (ranks.data_parallel.rank, value)))
    return [parts[rank] for rank in range(ranks.data_parallel.size)]


def from_coordinator(ranks: Ranks, make: Callable[[], Value], *, group: Any = None) -> Value:
    """Call `make` on rank 0, and return its value on every rank. BadInput on rank 0 is raised on every rank.

    `group` is the process group, as in `gather`.
    """
    return together(ranks, make, only=ranks.coordinates, group=group)[0]


def together(ranks: Ranks, work: Callable[[], Value], *, only: bool = True, group: Any = None) -> list[Value]:
    """Call `work` on the ranks where `only` is true. Return the values, in the order of ranks, on every rank.

    BadInput on any rank is raised on all ranks, so that no rank waits for one that has failed. If several ranks raise
    BadInput, the lowest rank's error is used. An OSError that names a file becomes BadInput.
    """
    value: Any = None
    problem: BadInput | None = None
    if only:
        try:
            value = work()
        except BadInput as error:
            problem = error
        except OSError as error:
            if error.filename is None:  # for example, a lost connection
                raise
            problem = BadInput(system_error(error), reason=reason_of_system_error(error))
    outcomes = gather(ranks, (only, value, problem), group)
    for _, _, failure in outcomes:
        if failure is not None:
            raise joined([failure])
    return [outcome for took_part, outcome, _ in outcomes if took_part]


def once_per_disk(ranks: Ranks, disk: RankGroup, work: Callable[[], Value]) -> list[Value]:
    """Call `work` on the first rank of each disk, and return the values of all disks on every rank.

    `disk` has the ranks that share this rank's copy of the run directory. Errors are raised as `together` raises them.
    """
    return together(ranks, work, only=disk.rank == 0, group=ranks.download)


def members(ranks: Ranks, group: RankGroup) -> range:
    """Return the global ranks of the members of `group`, which are the ranks of one node or one disk."""
    first = ranks.rank - group.rank
    return range(first, first + group.size)


def _rendezvous() -> tuple[Any, int, int]:
    """Return the rendezvous store, this rank and the world size."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return torchrun_store(), environment_rank(), int(os.environ["WORLD_SIZE"])
    # With any other launcher, rank 0 hosts the store, and rank 0 may start late.
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
    except dist.DistError as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        problem = f"rank 0 does not answer at MASTER_ADDR {address}, MASTER_PORT {port}"
        if environment_rank() == 0:
            problem = f"rank 0 cannot listen on MASTER_PORT {port}; set another port for all ranks"
        raise BadInput(f"{problem}: {str(error).splitlines()[0]}", alone=True) from error
    return store, rank, world_size
