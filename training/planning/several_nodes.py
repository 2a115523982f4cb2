"""Steps on several nodes, simulated from bytes and link speeds: the communication that computation does not hide.

Nothing of it is measured on several machines. The sum of gradients is that on two levels (training/parallel/
ordered_reduce.py), whose bytes are counted at the cable between two network namespaces.
"""

import math

import attrs

from model.config import ModelConfig
from model.counts import parameter_count
from training.config.batch_plan import Plan
from training.planning.throughput import Throughput

BACKWARD_SHARE = 2 / 3  # of a micro-batch's computation
LAST_BUCKETS = 0.15  # of the gradient: the embeddings' bucket, ready when the backward pass ends
GRADIENT_BYTES = 4  # of a parameter
GATHERED_BYTES = 2 * 2  # of a parameter in bf16: FSDP gathers it for the forward and for the backward pass


@attrs.frozen(kw_only=True)
class Network:
    """Machines of a job, and the links between them."""

    nodes: int = 1
    link: float = math.inf  # GB/s of a node to the others, each direction


@attrs.frozen(kw_only=True)
class Links:
    """Assumptions about a cluster's links; GB/s, each direction."""

    node: float  # of a node to the others, all network cards together
    inside: float = 300.0  # of one GPU to those of its node, as a collective reaches it
    latency_us: float = 30.0  # of a collective of one bucket, for each other node


@attrs.frozen(kw_only=True)
class StepTime:
    """A step on so many nodes, in seconds."""

    compute: float
    inside: float  # communication within nodes
    across: float  # and between them
    exposed: float  # of both

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def step_time(
    parameters: int, links: Links, gpus: tuple[int, int], *, compute: float, accumulation: int = 1
) -> StepTime:
    """Return a step. `gpus`: nodes, GPUs of each; `compute`: its seconds without communication, of all micro-batches.

    A GPU's last micro-batch of `accumulation` hides communication behind its backward pass.
    """
    nodes, node_gpus = gpus
    gradient = GRADIENT_BYTES * parameters
    inside = 2 * (node_gpus - 1) / node_gpus * gradient / (links.inside * 1e9)
    across = 2 * (nodes - 1) / nodes * gradient / (links.node * 1e9) + (nodes - 1) * links.latency_us * 1e-6
    hidden = min(BACKWARD_SHARE * compute / accumulation, (1 - LAST_BUCKETS) * (inside + across))
    return StepTime(compute=compute, inside=inside, across=across, exposed=inside + across - hidden)


def on_network(alone: Throughput, network: Network, model: ModelConfig, plan: Plan, *, gathers: bool) -> Throughput:
    """Return the throughput of all nodes, from that of one.

    `gathers`: under FSDP on all GPUs, which also gathers the weights over the link, for each micro-batch.
    """
    nodes, accumulation, parameters = network.nodes, plan.layout.accumulation, parameter_count(model)
    compute = plan.tokens_per_step / (nodes * alone.tokens_per_second)
    gpus = nodes, plan.layout.data_parallel_size // nodes
    step = step_time(parameters, Links(node=network.link), gpus, compute=compute, accumulation=accumulation)
    weights = GATHERED_BYTES * parameters * (nodes - 1) / nodes * accumulation / (network.link * 1e9)
    seconds = step.seconds + (max(0.0, weights - compute) if gathers else 0.0)
    return Throughput(plan.tokens_per_step / seconds, f"simulation from one node's: {alone.source}")
