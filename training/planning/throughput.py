"""Training throughput of a machine: measured tokens per second or, without a measurement, a roofline estimate."""

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
OURS = "Lockstep"  # the name of this trainer in measurements.json
MEASURED, OTHERS = "measured here", "others"
ESTIMATE, ROUGH = "estimate", "rough"  # from the roofline; "rough" if the roofline was fitted to another GPU
SIMULATION = "simulation"  # the throughput of several nodes, calculated from that of one node
# Half of the matmul parameters of GPT-2 124M, which is the smallest network to which the estimates are fitted. Smaller
# networks spend most of their time on kernel launches and on the host, which a roofline cannot predict.
LEAST_PARAMETERS = matmul_parameter_count(GPT2_SMALL) // 2
# Options of the network that change its speed little or not at all
SAME_SPEED = {*FREE_KEYS, "qkv_bias", "tie_weights", "norm_eps", "rope_base"}

# Bytes that our compiled kernels move per token. For a block, network_sizes.py counts the bytes if everything is fused
# ("fused bytes"), and the bytes if every operator is a separate kernel ("unfused bytes"); the estimate is the fused
# bytes plus UNFUSED_SHARE of the unfused bytes. For GPT-2 in four sizes, benchmarks/kernel_bytes.py counts 136.6 to
# 145 bytes per layer and channel, excluding costs that shrink with larger micro-batches (weight casts, the optimizer).
# LAYER_BYTES is the sum of the 116 fused bytes and 20 of the 172 unfused bytes. The share is fitted to GPT-2. For the
# shapes of NanoChat and Qwen3, the estimate is within 3% of that script's count.
LAYER_BYTES = 136
UNFUSED_SHARE = 20 / 172
# Bytes that the loss moves per token and per row of the vocabulary, counted like the bytes of a layer
LOSS_BYTES = 6
SOFTCAP_LOSS_BYTES = 2

# Constants for steps on several nodes. None of this has been measured on real machines. Gradients are summed on two
# levels (training/parallel/ordered_reduce.py); the bytes sent were counted on a virtual link between two network
# namespaces.
BACKWARD_SHARE = 2 / 3  # share of the backward pass in a micro-batch's computation
LAST_BUCKETS = 0.15  # share of the gradient in the embeddings' bucket, which is only ready after the backward pass
GRADIENT_BYTES = 4  # per parameter
GATHERED_BYTES = 2 * 2  # per parameter in bf16: FSDP gathers it for the forward pass and for the backward pass
# The next three numbers are assumptions: the bandwidth, in each direction, that a collective reaches between a GPU and
# the other GPUs of its node; the same bandwidth over PCIe, for tensor ranks without NVLink; and the latency that each
# additional node adds to the collective of one bucket.
INSIDE_GB_PER_SECOND, PCIE_GB_PER_SECOND = 300.0, 16.0
LATENCY_SECONDS = 30e-6


@attrs.frozen
class Efficiency:
    """The fractions of a GPU's datasheet numbers that training reaches.

    Matrix products and causal attention reach fractions of the dense bf16 peak, and elementwise kernels reach a
    fraction of the memory bandwidth.
    """

    matmul: float
    attention: float
    bandwidth: float


# With these fractions for matrix products and attention, and the bytes of llm.c's kernels, the roofline reproduces
# llm.c's published runs, which are listed in tests/training/planning/test_throughput.py. The fractions also apply to
# Lockstep, because Lockstep and llm.c both use cuBLAS and cuDNN for these operations. The fraction of the bandwidth is
# what elementwise kernels reached on one H100. For every other GPU, `similar_to` says whose fractions apply.
FITS = {"a100": Efficiency(0.83, 0.18, 0.79), "h100": Efficiency(0.607, 0.15, 0.79)}
# These are torch's names of the GPUs. Estimates for the H200 are 1 to 10% below its measured throughput.
FITTED = ("A100", "H100", "H200")
NVLINK = (*FITTED, "B200", "GB200")
EXCHANGES = (
    f"{INSIDE_GB_PER_SECOND:g} GB/s among tensor ranks, or {PCIE_GB_PER_SECOND:g} GB/s without NVLink (not measured)"
)


@attrs.frozen
class Throughput:
    """Tokens per second of a whole machine, and where the number comes from."""

    tokens_per_second: float
    kind: str  # MEASURED, OTHERS, ESTIMATE, ROUGH or SIMULATION
    trainer: str | None = None  # the trainer that was measured

    @property
    def measured(self) -> bool:
        """Whether this was measured, with Lockstep or with another trainer."""
        return self.kind in (MEASURED, OTHERS)


@attrs.frozen(kw_only=True)
class Network:
    """Machines of the same kind that train a run together."""

    nodes: int = 1
    link: float = math.inf  # GB/s between a node and all other nodes, in each direction


def throughputs(
    config: ModelConfig, machine: Machine, tokens_per_step: int | None = None, train: TrainConfig | None = None
) -> list[Throughput]:
    """Return the known throughputs of a machine, the slowest first.

    The list is empty for a small network without measurements.

    If the price list has a number for the machine, only that number is returned. Otherwise, if Lockstep has been
    measured, only its newest measurement is returned. Without either, measurements of other trainers and an estimate
    are returned. A measurement of a small network is valid only for its `tokens_per_step`, because kernel launches take
    most of the time. `train` has the settings of the run. With tensor shards, the throughput is always estimated.
    """
    # If a measurement does not state an option, it was made with GPT-2's value.
    shape = [field for field in attrs.fields(ModelConfig) if field.name not in SAME_SPEED]
    matches = [
        Throughput(row["tokens_per_second"], MEASURED if row["trainer"] == OURS else OTHERS, row["trainer"])
        for row in reversed(read_json(MEASUREMENTS, list) if train is None or train.execution.shards == 1 else [])
        if (row["gpu"], row["gpus"]) == (machine.gpu.name, machine.gpus)
        and row.get("tokens_per_step", tokens_per_step) == tokens_per_step
        and all(getattr(config, field.name) == row.get(field.name, field.default) for field in shape)
    ]
    ours = [match for match in matches if match.kind == MEASURED]
    if machine.tokens_per_second is not None:
        ours = [Throughput(machine.tokens_per_second, MEASURED)]
    if ours:
        return ours[:1]
    candidates = [match for match in matches if match.kind == OTHERS]
    if matmul_parameter_count(config) >= LEAST_PARAMETERS:
        kind = ESTIMATE if machine.gpu.torch_name in FITTED else ROUGH
        candidates.append(Throughput(machine.gpus * roofline(config, machine.gpu, train), kind))
    return sorted(candidates, key=lambda candidate: candidate.tokens_per_second)


def on_network(
    one_node: Throughput, network: Network, model: ModelConfig, plan: Plan, train: TrainConfig
) -> Throughput:
    """Return the throughput of all nodes together, given the throughput of one node.

    With parallel "fsdp", the weights are sharded over the GPUs of all nodes, and are therefore gathered over the link
    for every micro-batch.
    """
    layout, nodes, gradient = plan.layout, network.nodes, GRADIENT_BYTES * parameter_count(model)
    node_gpus, accumulation = layout.data_parallel_size // nodes, layout.accumulation
    compute = plan.tokens_per_step / (nodes * one_node.tokens_per_second)
    inside = 2 * (node_gpus - 1) / node_gpus * gradient / (INSIDE_GB_PER_SECOND * 1e9)
    inside /= train.execution.tensor_parallel  # each tensor rank reduces only its part of the gradient
    across = 2 * (nodes - 1) / nodes * gradient / (network.link * 1e9) + (nodes - 1) * LATENCY_SECONDS
    # The last micro-batch hides communication behind its backward pass.
    hidden = min(BACKWARD_SHARE * compute / accumulation, (1 - LAST_BUCKETS) * (inside + across))
    seconds = compute + inside + across - hidden
    weights = GATHERED_BYTES * parameter_count(model) * (nodes - 1) / nodes * accumulation / (network.link * 1e9)
    seconds += max(0.0, weights - compute) if train.execution.parallel == "fsdp" else 0.0
    return Throughput(plan.tokens_per_step / seconds, SIMULATION)


def roofline(config: ModelConfig, gpu: Gpu, train: TrainConfig | None = None) -> float:
    """Estimate the tokens per second of one GPU in bf16.

    The estimate adds up the times of matrix products, attention and memory traffic. GPUs that share layers do the same
    amount of work per GPU as if each GPU had its own tokens, and they also wait for all their exchanges.
    """
    seconds = seconds_per_token(config, gpu, FITS[gpu.similar_to])
    if train is not None and (shards := train.execution.shards) > 1:
        ranks = train.execution.tensor_parallel
        link = INSIDE_GB_PER_SECOND if gpu.torch_name in NVLINK else PCIE_GB_PER_SECOND
        seconds["exchange"] = ranks * exchange_bytes(config, train) / (link * 1e9)
        seconds["elementwise"] *= ranks * block_traffic(config, shards, ranks) / block_traffic(config)
    return 1 / sum(seconds.values())


def exchange_bytes(config: ModelConfig, train: TrainConfig) -> float:
    """Return the bytes per token that a rank receives from the ranks that share its layers, in both passes.

    Each of the N ranks has L of the S shards, and C is the width of the embedding. Twice per layer, a rank gathers C
    elements and adds up L * C elements; the backward pass does the reverse. In both passes together, the head needs one
    such gather and one such sum, and so does the embedding, but in fp32. A recomputed block repeats its exchanges,
    except for its last sum, which is repeated only with dropout. The loss exchanges 2 fp32 numbers per shard; if it is
    computed in chunks, it does so twice. Of everything that is gathered or summed, (N - 1) / N comes from other ranks.
    The sums of shared gradients (`add_shared`), which are computed once per step, are not counted.
    """
    shards, ranks, layers = train.execution.shards, train.execution.tensor_parallel, config.n_layers
    size, local = 4 if train.execution.precision == "fp32" else 2, shards // ranks
    bytes_per_channel = (1 + local) * (size * (4 * layers + 1) + 4)
    bytes_per_channel += size * layers * (2 + local * (1 + (config.drop_rate > 0))) * train.memory.recompute_blocks
    loss = 4 * 2 * shards * (1 + (train.memory.loss_chunks > 1))
    return (bytes_per_channel * config.emb_dim + loss) * (ranks - 1) / ranks


def seconds_per_token(config: ModelConfig, gpu: Gpu, efficiency: Efficiency) -> dict[str, float]:
    """Return the seconds that one GPU needs per token for each kind of work."""
    sizes, layers = network_sizes(config), config.n_layers
    keys = config.context_length / 2  # a query attends to half of the keys on average, because attention is causal
    bytes_per_second = efficiency.bandwidth * gpu.gb_per_second * 1e9
    loss_bytes = LOSS_BYTES + SOFTCAP_LOSS_BYTES * (config.logit_softcap is not None)
    return {
        "matmul": 6 * matmul_parameter_count(config) / (efficiency.matmul * gpu.peak_flops),
        "attention": 12 * layers * sizes.attention_width * keys / (efficiency.attention * gpu.peak_flops),
        "elementwise": layers * block_traffic(config) / bytes_per_second,
        "loss": loss_bytes * config.vocab_size / bytes_per_second,
    }


def block_traffic(config: ModelConfig, shards: int = 1, ranks: int = 1) -> float:
    """Return the bytes per token that a block's compiled kernels move on each of the ranks that share the block."""
    sizes = network_sizes(config, shards, ranks)
    return sizes.fused_bytes + UNFUSED_SHARE * sizes.separate_bytes
