"""Training throughput of a machine: measured tokens per second, else an estimate, by a roofline."""

import math
from pathlib import Path

import attrs

from common.json_files import read_json
from model.config import GPT2_SMALL, ModelConfig
from model.counts import matmul_parameter_count, parameter_count
from training.checkpoints.initial_weights import FREE_KEYS
from training.config.batch_plan import Plan
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu
from training.planning.network_sizes import network_sizes
from training.planning.price_list import Machine

MEASUREMENTS = Path(__file__).with_name("measurements.json")
OURS = "Lockstep"
MEASURED, OTHERS = "measured here", "others"
ESTIMATE, ROUGH = "estimate", "rough"  # by the roofline; rough: fitted to a similar GPU
SIMULATION = "simulation"  # of several nodes, from one's
# Matmul parameters, half of GPT-2 124M's, the smallest network that the estimates are fitted to: launches and the host
# take most of the time of smaller ones, and no roofline knows how much.
LEAST_PARAMETERS = matmul_parameter_count(GPT2_SMALL) // 2
# Options of the network that change its speed little or not at all.
SAME_SPEED = {*FREE_KEYS, "qkv_bias", "tie_weights", "norm_eps", "rope_base"}

# Bytes that our compiled kernels move per token. Of a block: those of network_sizes.py with everything fused, and this
# share of those with a kernel for each operator. benchmarks/kernel_bytes.py counts 136.6 to 145 for each layer and C of
# GPT-2 in four sizes, without what weighs less with larger micro-batches (casts of weights, the optimizer): 136 =
# 116 + 20, of 172. The share is fitted to GPT-2's; for the shapes of NanoChat and Qwen3 the sum is within 3 % of
# that script's count.
LAYER_BYTES = 136
UNFUSED_SHARE = 20 / 172
# Of the loss, for each row of the vocabulary, counted likewise.
LOSS_BYTES = 6
SOFTCAP_LOSS_BYTES = 2

# Of steps on several nodes. Nothing of it is measured on several machines. The sum of gradients is that on two levels
# (training/parallel/ordered_reduce.py), whose bytes are counted at the cable between two network namespaces.
BACKWARD_SHARE = 2 / 3  # of a micro-batch's computation
LAST_BUCKETS = 0.15  # of the gradient: the embeddings' bucket, ready when the backward pass ends
GRADIENT_BYTES = 4  # of a parameter
GATHERED_BYTES = 2 * 2  # of a parameter in bf16: FSDP gathers it for the forward and for the backward pass
# Assumed: between a GPU and those of its node, each direction, as a collective reaches it; for each other node, of a
# collective of one bucket.
INSIDE_GB_PER_SECOND, PCIE_GB_PER_SECOND = 300.0, 16.0  # PCIe: of tensor ranks without NVLink
LATENCY_SECONDS = 30e-6


@attrs.frozen
class Efficiency:
    """Shares of a GPU's datasheet: of the dense bf16 peak in matrix products and causal attention, of the bandwidth."""

    matmul: float
    attention: float
    bandwidth: float


# Products and attention: what explains llm.c's published runs with the bytes of its own kernels; both trainers have
# them from cuBLAS and cuDNN (the runs: tests/training/planning/test_throughput.py). Bandwidth: what elementwise kernels
# reached on one H100. A GPU of another kind takes the similar one's.
FITS = {"a100": Efficiency(0.83, 0.18, 0.79), "h100": Efficiency(0.607, 0.15, 0.79)}
FITTED = ("A100", "H100", "H200")  # torch's names; the H200's estimates are 1 to 10 % below what it was measured at
NVLINK = (*FITTED, "B200", "GB200")
EXCHANGES = f"{INSIDE_GB_PER_SECOND:g} GB/s among tensor ranks, {PCIE_GB_PER_SECOND:g} without NVLink (not measured)"


@attrs.frozen
class Throughput:
    """Tokens per second of a whole machine, and their source."""

    tokens_per_second: float
    kind: str  # MEASURED, OTHERS, ESTIMATE, ROUGH or SIMULATION
    trainer: str | None = None  # of a measurement

    @property
    def measured(self) -> bool:
        """True for a measurement, by anybody."""
        return self.kind in (MEASURED, OTHERS)


@attrs.frozen(kw_only=True)
class Network:
    nodes: int = 1
    link: float = math.inf  # GB/s of a node to the others, each direction


def throughputs(
    config: ModelConfig, machine: Machine, tokens_per_step: int | None = None, train: TrainConfig | None = None
) -> list[Throughput]:
    """Return the throughputs that are known, the slowest first; none for a small network that nobody has measured.

    That of the price list, or Lockstep's newest measurement; else those of other trainers and an estimate. A
    measurement of a small network is of its `tokens_per_step`, as launches take most of the time. `train`: the run,
    with its tensor shards, which are estimated.
    """
    # Options that a measurement leaves out are GPT-2's.
    shape = [field for field in attrs.fields(ModelConfig) if field.name not in SAME_SPEED]
    found = [
        Throughput(row["tokens_per_second"], MEASURED if row["trainer"] == OURS else OTHERS, row["trainer"])
        for row in reversed(read_json(MEASUREMENTS, list) if train is None or train.execution.shards == 1 else [])
        if (row["gpu"], row["gpus"]) == (machine.gpu.name, machine.gpus)
        and row.get("tokens_per_step", tokens_per_step) == tokens_per_step
        and all(getattr(config, field.name) == row.get(field.name, field.default) for field in shape)
    ]
    ours, others = ([each for each in found if each.kind == kind] for kind in (MEASURED, OTHERS))
    if machine.tokens_per_second is not None:
        ours = [Throughput(machine.tokens_per_second, MEASURED)]
    if ours:
        return ours[:1]
    if matmul_parameter_count(config) >= LEAST_PARAMETERS:
        kind = ESTIMATE if machine.gpu.torch_name in FITTED else ROUGH
        others.append(Throughput(machine.gpus * roofline(config, machine.gpu, train), kind))
    return sorted(others, key=lambda each: each.tokens_per_second)


def on_network(alone: Throughput, network: Network, model: ModelConfig, plan: Plan, train: TrainConfig) -> Throughput:
    """Return the throughput of all nodes, from that of one.

    FSDP on all GPUs also gathers the weights over the link, for each micro-batch.
    """
    layout, nodes, gradient = plan.layout, network.nodes, GRADIENT_BYTES * parameter_count(model)
    node_gpus, accumulation = layout.data_parallel_size // nodes, layout.accumulation
    compute = plan.tokens_per_step / (nodes * alone.tokens_per_second)
    inside = 2 * (node_gpus - 1) / node_gpus * gradient / (INSIDE_GB_PER_SECOND * 1e9)
    inside /= train.execution.tensor_parallel  # each reduces its part
    across = 2 * (nodes - 1) / nodes * gradient / (network.link * 1e9) + (nodes - 1) * LATENCY_SECONDS
    # The last micro-batch hides communication behind its backward pass.
    hidden = min(BACKWARD_SHARE * compute / accumulation, (1 - LAST_BUCKETS) * (inside + across))
    seconds = compute + inside + across - hidden
    weights = GATHERED_BYTES * parameter_count(model) * (nodes - 1) / nodes * accumulation / (network.link * 1e9)
    seconds += max(0.0, weights - compute) if train.execution.parallel == "fsdp" else 0.0
    return Throughput(plan.tokens_per_step / seconds, SIMULATION)


def roofline(config: ModelConfig, gpu: Gpu, train: TrainConfig | None = None) -> float:
    """Estimate tokens per second of one GPU, bf16: matrix products, attention and memory traffic one by one.

    GPUs that share layers do as much of these as if each had tokens of its own, and wait for all their exchanges.
    """
    seconds = seconds_per_token(config, gpu, FITS[gpu.similar_to])
    if train is not None and (shards := train.execution.shards) > 1:
        ranks = train.execution.tensor_parallel
        link = INSIDE_GB_PER_SECOND if gpu.torch_name in NVLINK else PCIE_GB_PER_SECOND
        seconds["exchange"] = ranks * exchange_bytes(config, train) / (link * 1e9)
        seconds["elementwise"] *= ranks * block_traffic(config, shards, ranks) / block_traffic(config)
    return 1 / sum(seconds.values())


def exchange_bytes(config: ModelConfig, train: TrainConfig) -> float:
    """Return the bytes that a rank gets from those that share its layers, in both passes, per token.

    Of C elements, with L of S shards on each of N ranks, a layer gathers C and sums up L C twice, and the other way
    round in its backward pass; so does the head once, and, in fp32, the embedding. A recomputed block does both again,
    but its last sum for dropout alone; a chunked loss, 2 fp32 numbers of each shard, is computed twice. From others
    comes (N - 1) / N of a result. Not counted: sums of shared gradients, once a step (`add_shared`).
    """
    shards, ranks, layers = train.execution.shards, train.execution.tensor_parallel, config.n_layers
    size, local = 4 if train.execution.precision == "fp32" else 2, shards // ranks
    each = (1 + local) * (size * (4 * layers + 1) + 4)
    each += size * layers * (2 + local * (1 + (config.drop_rate > 0))) * train.memory.recompute_blocks
    loss = 4 * 2 * shards * (1 + (train.memory.loss_chunks > 1))
    return (each * config.emb_dim + loss) * (ranks - 1) / ranks


def seconds_per_token(config: ModelConfig, gpu: Gpu, reached: Efficiency) -> dict[str, float]:
    sizes, layers = network_sizes(config), config.n_layers
    keys = config.context_length / 2  # that a query attends to, on average: of all, the causal half
    traffic = reached.bandwidth * gpu.gb_per_second * 1e9
    return {
        "matmul": 6 * matmul_parameter_count(config) / (reached.matmul * gpu.peak_flops),
        "attention": 12 * layers * sizes.attention_width * keys / (reached.attention * gpu.peak_flops),
        "elementwise": layers * block_traffic(config) / traffic,
        "loss": (LOSS_BYTES + SOFTCAP_LOSS_BYTES * (config.logit_softcap is not None)) * config.vocab_size / traffic,
    }


def block_traffic(config: ModelConfig, shards: int = 1, ranks: int = 1) -> float:
    """Return the bytes that the compiled kernels of a block move per token, on each rank of those that share it."""
    sizes = network_sizes(config, shards, ranks)
    return sizes.fused_bytes + UNFUSED_SHARE * sizes.separate_bytes
