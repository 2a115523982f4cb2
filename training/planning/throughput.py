"""Training throughput of a machine: measured tokens per second, else a roofline bound fitted to published trainers."""

from pathlib import Path

import attrs

from common.json_files import read_json
from model.config import ModelConfig, matmul_parameter_count
from training.hardware.gpus import Gpu
from training.planning.price_list import Machine

MEASUREMENTS = Path(__file__).with_name("measurements.json")
OURS = "Lockstep"
ENTERED = "entered in the price list"
MEASURED, ANOTHER_TRAINER = "measured, Lockstep", "measured, another trainer"
BOUND, SIMILAR = "upper bound: roofline", "upper bound: roofline, not fitted"  # to this GPU, or to a similar one

# Bytes that move per token: of a layer 47 tensors of C in bf16, of the logits three of V in bf16.
LAYER_BYTES = 47 * 2
LOGIT_BYTES = 3 * 2
BANDWIDTH_SHARE = 0.79  # of the datasheet's: what elementwise kernels reach on one H100

# llm.c on 8 GPUs, so what communication takes is in them; tokens/s per GPU: scripts/run_gpt2_*.sh and discussions 481
# and 677 of karpathy/llm.c, and KellerJordan/modded-nanogpt's record of 2024-10-13.
# A100: 124M 218 K, 350M 80 K, 774M 38.6 K; this fit: 217, 80, 39. H100: 468, 188, 1.5B 47.6 K; this fit: 486, 181, 46.
# Shares of the dense bf16 peak in matrix products and causal attention; a GPU of another kind takes the similar one's.
FITS = {"a100": (0.83, 0.18), "h100": (0.607, 0.15)}
FITTED = ("A100", "H100")  # torch's names


@attrs.frozen
class Throughput:
    """Tokens per second of a whole machine, and their source."""

    tokens_per_second: float
    source: str  # ENTERED, MEASURED, ANOTHER_TRAINER, BOUND or SIMILAR
    trainer: str | None = None  # of a measurement

    @property
    def measured(self) -> bool:
        """True for a measurement, by anybody; False for a bound."""
        return self.source not in (BOUND, SIMILAR)


def throughputs(config: ModelConfig, machine: Machine) -> list[Throughput]:
    """Return the throughput to plan with, then those to show beside it.

    The first is that of the price list, or Lockstep's newest measurement, else another trainer's, else a bound. Beside
    it are measurements of other trainers, and the bound where only they have measured.
    """
    wanted = attrs.asdict(config) | {"gpu": machine.gpu.name, "gpus": machine.gpus}
    shape = ("gpu", "gpus", "vocab_size", "context_length", "emb_dim", "n_heads", "n_layers")
    ours, others = [], []
    for row in reversed(read_json(MEASUREMENTS, list)):
        if all(row[key] == wanted[key] for key in shape):
            speed, trainer = row["tokens_per_second"], row["trainer"]
            if trainer == OURS:
                ours.append(Throughput(speed, MEASURED, trainer))
            else:
                others.append(Throughput(speed, ANOTHER_TRAINER, trainer))
    if machine.tokens_per_second is not None:
        ours = [Throughput(machine.tokens_per_second, ENTERED)]
    if ours:
        return [ours[0], *others]
    source = BOUND if machine.gpu.torch_name in FITTED else SIMILAR
    return [*others, Throughput(machine.gpus * roofline(config, machine.gpu), source)]


def roofline(config: ModelConfig, gpu: Gpu) -> float:
    """Return tokens per second of one GPU, bf16: matrix products, attention and memory traffic one after the other."""
    return 1 / sum(seconds_per_token(config, gpu).values())


def seconds_per_token(config: ModelConfig, gpu: Gpu) -> dict[str, float]:
    """Return the roofline by kind of kernel."""
    matmul_share, attention_share = FITS[gpu.similar_to]
    width, layers = config.emb_dim, config.n_layers
    traffic = BANDWIDTH_SHARE * gpu.bytes_per_second
    return {
        "matmul": 6 * matmul_parameter_count(config) / (matmul_share * gpu.peak_flops),
        # of the T x T products, the causal half
        "attention": 6 * layers * width * config.context_length / (attention_share * gpu.peak_flops),
        "elementwise": LAYER_BYTES * width * layers / traffic,
        "loss": LOGIT_BYTES * config.vocab_size / traffic,
    }
