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
# Assumed: between a GPU and those of its node, each direction, as a collective reaches it; for each other node, of a
# collective of one bucket.
INSIDE_GB_PER_SECOND = 300.0
LATENCY_SECONDS = 30e-6


@attrs.frozen(kw_only=True)
class Network:
    """Machines of a job, and the links between them."""

    nodes: int = 1
    link: float = math.inf  # GB/s of a node to the others, each direction


def on_network(alone: Throughput, network: Network, model: ModelConfig, plan: Plan, *, gathers: bool) -> Throughput:
    """Return the throughput of all nodes, from that of one.

    `gathers`: under FSDP on all GPUs, which also gathers the weights over the link, for each micro-batch.
    """
    layout, nodes, gradient = plan.layout, network.nodes, GRADIENT_BYTES * parameter_count(model)
    node_gpus, accumulation = layout.data_parallel_size // nodes, layout.accumulation
    compute = plan.tokens_per_step / (nodes * alone.tokens_per_second)
    inside = 2 * (node_gpus - 1) / node_gpus * gradient / (INSIDE_GB_PER_SECOND * 1e9)
    across = 2 * (nodes - 1) / nodes * gradient / (network.link * 1e9) + (nodes - 1) * LATENCY_SECONDS
    # The last micro-batch hides communication behind its backward pass.
    hidden = min(BACKWARD_SHARE * compute / accumulation, (1 - LAST_BUCKETS) * (inside + across))
    seconds = compute + inside + across - hidden
    weights = GATHERED_BYTES * parameter_count(model) * (nodes - 1) / nodes * accumulation / (network.link * 1e9)
    seconds += max(0.0, weights - compute) if gathers else 0.0
    return Throughput(plan.tokens_per_step / seconds, f"simulation from one node's: {alone.source}")
