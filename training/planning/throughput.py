"""Training throughput of a machine: measured tokens per second, else an estimate, by a roofline."""

import math
from pathlib import Path

import attrs

from common.json_files import read_json
from model.config import GPT2_SMALL, ModelConfig, attention_window
from model.counts import matmul_parameter_count, parameter_count
from training.config.batch_plan import Plan
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu
from training.initial_weights import FREE_KEYS
from training.planning.network_sizes import NetworkSizes, network_sizes
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
FP32_BYTES = 4
# Assumed: between a GPU and those of its node, each direction, as a collective reaches it; for each other node, of a
# collective of one bucket.
INSIDE_GB_PER_SECOND = 300.0
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
    measurement of a small network is of its `tokens_per_step`, as launches take most of the time. `train`: how tensor
    shards are computed, of which only estimates are known; None: without.
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
    node_gpus, accumulation = layout.data_parallel_size // nodes, layout.accumulation  # of tensor ranks, one counts
    # Ranks that share each layer reduce their parts side by side, with their own copies of what several have.
    parts = (sizes.parameters(model.n_layers) for sizes in (_sizes(model, train), network_sizes(model)))
    own = gradient * next(parts) / next(parts)
    compute = plan.tokens_per_step / (nodes * alone.tokens_per_second)
    inside = 2 * (node_gpus - 1) / node_gpus * own / (INSIDE_GB_PER_SECOND * 1e9)
    across = 2 * (nodes - 1) / nodes * gradient / (network.link * 1e9) + (nodes - 1) * LATENCY_SECONDS
    # The last micro-batch hides communication behind its backward pass.
    hidden = min(BACKWARD_SHARE * compute / accumulation, (1 - LAST_BUCKETS) * (inside + across))
    seconds = compute + inside + across - hidden
    weights = GATHERED_BYTES * parameter_count(model) * (nodes - 1) / nodes * accumulation / (network.link * 1e9)
    seconds += max(0.0, weights - compute) if train.execution.parallel == "fsdp" else 0.0
    return Throughput(plan.tokens_per_step / seconds, SIMULATION)


def exchange_bytes(config: ModelConfig, train: TrainConfig, sequences: int) -> int:
    """Return the bytes that a rank gets from those that it shares layers with: a micro-batch's two passes.

    Of E = B T C elements of b bytes (bf16: 2), on N ranks with L of S shards each: a layer gathers E twice, and sums up
    L E twice, each the other way round in its backward pass; so does the head once, and in fp32 the embedding. To
    recompute a block does both again, but the last sum only for dropout; a chunked loss is computed twice, of 2 fp32
    numbers for each token and shard. A collective moves (N - 1) / N of its result. Shared gradients (add_shared), once
    a step, are not counted.
    """
    shards, ranks, layers = train.execution.shards, train.execution.tensor_parallel, config.n_layers
    local, tokens = shards // ranks, sequences * config.context_length
    size = FP32_BYTES if train.execution.precision == "fp32" else FP32_BYTES // 2
    times = (1 + local) * (size * (4 * layers + 1) + FP32_BYTES)
    times += size * layers * (2 + local * (1 + (config.drop_rate > 0))) * train.memory.recompute_blocks
    loss = 2 * FP32_BYTES * shards * (1 + (train.memory.loss_chunks > 1))
    return tokens * (times * config.emb_dim + loss) * (ranks - 1) // ranks


def roofline(config: ModelConfig, gpu: Gpu, train: TrainConfig | None = None) -> float:
    """Estimate tokens per second of one GPU, bf16: matrix products, attention and memory traffic one by one."""
    sharing = 1 if train is None else train.execution.tensor_parallel
    return 1 / (sharing * sum(seconds_per_token(config, gpu, FITS[gpu.similar_to], train).values()))


def seconds_per_token(
    config: ModelConfig, gpu: Gpu, reached: Efficiency, train: TrainConfig | None = None
) -> dict[str, float]:
    """Return the seconds of a GPU, or of the ranks that share each layer, which wait for their exchanges."""
    sizes, length, layers = _sizes(config, train), config.context_length, config.n_layers
    ranks = sizes.ranks
    window = min(attention_window(config) or length, length)
    keys = window - window**2 / (2 * length)  # that a query attends to, on average: of all, the causal half
    traffic = reached.bandwidth * gpu.gb_per_second * 1e9
    seconds = {
        "matmul": 6 * matmul_parameter_count(config) / ranks / (reached.matmul * gpu.peak_flops),
        "attention": 12 * layers * sizes.attention_width * keys / (reached.attention * gpu.peak_flops),
        "elementwise": layers * block_traffic(config, train) / traffic,
        "loss": (LOSS_BYTES + SOFTCAP_LOSS_BYTES * (config.logit_softcap is not None))
        * config.vocab_size
        / (ranks * traffic),
    }
    if train is not None and ranks > 1:
        seconds["exchange"] = exchange_bytes(config, train, 1) / length / (INSIDE_GB_PER_SECOND * 1e9)
    return seconds


def block_traffic(config: ModelConfig, train: TrainConfig | None = None) -> float:
    """Return the bytes that the compiled kernels of a block move per token."""
    sizes = _sizes(config, train)
    return sizes.fused_bytes + UNFUSED_SHARE * sizes.separate_bytes


def _sizes(config: ModelConfig, train: TrainConfig | None) -> NetworkSizes:
    if train is None:
        return network_sizes(config)
    return network_sizes(config, train.execution.shards, train.execution.tensor_parallel)
