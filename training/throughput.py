"""Tokens per second of a machine: measured where somebody has, else from a roofline fitted to published trainers."""

import json
from pathlib import Path

import attrs

from model.config import ModelConfig, matmul_parameter_count
from training.hardware import known_peak_flops
from training.machines import Machine

MEASUREMENTS = Path(__file__).with_name("measurements.json")
OURS = "Lockstep"
ROOFLINE, SIMILAR = "roofline", "roofline, not fitted"  # on the GPUs that it was fitted to; on others

# Bytes that move per token: of a layer 47 tensors of C in bf16, of the logits three of V in bf16.
LAYER_BYTES = 47 * 2
LOGIT_BYTES = 3 * 2
BANDWIDTH_SHARE = 0.79  # of the datasheet's: what elementwise kernels reach on one H100


@attrs.frozen
class Efficiency:
    """What share of the dense bf16 peak the matrix products of a good trainer reach, and its causal attention."""

    matmul: float
    attention: float


# llm.c on 8 GPUs, so what communication takes is in them; tokens/s per GPU: scripts/run_gpt2_*.sh and discussions 481
# and 677 of karpathy/llm.c, and KellerJordan/modded-nanogpt's record of 2024-10-13.
# A100: 124M 218 K, 350M 80 K, 774M 38.6 K; this fit: 217, 80, 39. H100: 468, 188, 1.5B 47.6 K; this fit: 486, 181, 46.
AMPERE = Efficiency(0.83, 0.18)
HOPPER = Efficiency(0.607, 0.15)
FITTED = ("A100", "H100")
# The GPU's name for known_peak_flops, memory bytes/s of the datasheet, and the fit; other chips are taken for the
# more similar of these two.
GPUS = {
    "a10-24gb": ("A10", 0.600e12, AMPERE),
    "a100-40gb": ("A100", 1.555e12, AMPERE),
    "a100-80gb": ("A100", 2.039e12, AMPERE),
    "b200": ("B200", 8.0e12, HOPPER),
    "h100-80gb": ("H100", 3.35e12, HOPPER),
    "h200": ("H200", 4.8e12, HOPPER),
    "l4": ("L4", 0.300e12, AMPERE),
    "l40s-48gb": ("L40S", 0.864e12, AMPERE),
    "rtx3090-24gb": ("RTX 3090", 0.936e12, AMPERE),
    "rtx4090-24gb": ("RTX 4090", 1.008e12, AMPERE),
}


@attrs.frozen
class Throughput:
    """Tokens per second of a whole machine, and where the number is from."""

    tokens_per_second: float
    source: str


def throughput(config: ModelConfig, machine: Machine) -> Throughput:
    """Return what a machine trains: as its price list says, as measured with Lockstep, else by the roofline."""
    if machine.tokens_per_second is not None:
        return Throughput(machine.tokens_per_second, "entered in the price list")
    measured = [row for row in measurements(config, machine) if row.source == OURS]
    if measured:
        return measured[-1]
    fitted = GPUS[machine.gpu][0] in FITTED
    return Throughput(machine.gpus * roofline(config, machine.gpu), ROOFLINE if fitted else SIMILAR)


def measurements(config: ModelConfig, machine: Machine) -> list[Throughput]:
    """Return what trainers have been measured at, by any of them, of networks of this shape on such a machine."""
    wanted = attrs.asdict(config) | {"gpu": machine.gpu, "gpus": machine.gpus}
    shape = ("gpu", "gpus", "vocab_size", "context_length", "emb_dim", "n_heads", "n_layers")
    rows = json.loads(MEASUREMENTS.read_text())
    fitting = [row for row in rows if all(row[key] == wanted[key] for key in shape)]
    return [Throughput(row["tokens_per_second"], row["trainer"]) for row in fitting]


def roofline(config: ModelConfig, gpu: str) -> float:
    """Return tokens per second of one GPU, bf16: matrix products, attention and memory traffic one after the other."""
    return 1 / sum(seconds_per_token(config, gpu).values())


def most_tokens_per_second(config: ModelConfig, gpu: str) -> float:
    """Return what no trainer exceeds on one GPU: the matrix products alone, at the dense bf16 peak."""
    return _peak_flops(gpu) / (6 * matmul_parameter_count(config))


def seconds_per_token(config: ModelConfig, gpu: str) -> dict[str, float]:
    """Return what the roofline gives each kind of kernel."""
    _, bytes_per_second, efficiency = GPUS[gpu]
    peak = _peak_flops(gpu)
    width, layers = config.emb_dim, config.n_layers
    traffic = BANDWIDTH_SHARE * bytes_per_second
    return {
        "matmul": 6 * matmul_parameter_count(config) / (efficiency.matmul * peak),
        "attention": 6 * layers * width * config.context_length / (efficiency.attention * peak),  # the causal half
        "elementwise": LAYER_BYTES * width * layers / traffic,
        "loss": LOGIT_BYTES * config.vocab_size / traffic,
    }


def _peak_flops(gpu: str) -> float:
    peak = known_peak_flops(GPUS[gpu][0])
    assert peak is not None
    return peak
