"""Throughput: tokens/s that were entered or measured take precedence over a roofline fitted to a published trainer."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from model.config import GPT2_SIZES, ModelConfig
from model.sharded_loss import ShardedLoss
from model.shards import ShardedGPT, ShardExchange
from tests.conftest import ROOT, TINY_MODEL
from training.config.train_config import TrainConfig, load_run
from training.hardware.gpus import known_gpus
from training.planning.price_list import Machine
from training.planning.throughput import (
    FITS,
    LAYER_BYTES,
    MEASUREMENTS,
    OURS,
    Efficiency,
    block_traffic,
    exchange_bytes,
    roofline,
    seconds_per_token,
    throughputs,
)

# Tokens/s per GPU of llm.c on 8 GPUs, including communication, from scripts/run_gpt2_*.sh and discussions 481 and 677
# of karpathy/llm.c, and from KellerJordan/modded-nanogpt's record of 2024-10-13
LLM_C = [
    ("a100-80gb", "124M", 218e3),
    ("a100-80gb", "350M", 80e3),
    ("a100-80gb", "774M", 38.6e3),
    ("h100-80gb", "124M", 468e3),
    ("h100-80gb", "350M", 188e3),
    ("h100-80gb", "1.5B", 47.6e3),
]
# Bytes that the elementwise kernels of llm.c move per token, layer and channel. These kernels are written by hand, and
# the residual stream is in bf16.
LLM_C_LAYER_BYTES = 47 * 2


@pytest.mark.parametrize(("gpu", "size", "tokens_per_second"), LLM_C)
def test_roofline_explains_llm_c_and_is_slower_for_our_kernels(gpu: str, size: str, tokens_per_second: float) -> None:
    seconds = seconds_per_token(GPT2_SIZES[size], known_gpus()[gpu], FITS[known_gpus()[gpu].similar_to])
    seconds["elementwise"] *= LLM_C_LAYER_BYTES / LAYER_BYTES
    assert 1 / sum(seconds.values()) == pytest.approx(tokens_per_second, rel=0.05)
    assert 0.8 * tokens_per_second < roofline(GPT2_SIZES[size], known_gpus()[gpu]) < tokens_per_second


def bound(config: ModelConfig, gpu: str) -> float:
    """Return the tokens/s of an ideal GPU, whose kernels reach the full speed of the datasheet."""
    return 1 / sum(seconds_per_token(config, known_gpus()[gpu], Efficiency(1.0, 1.0, 1.0)).values())


def test_h200_estimates_are_within_ten_percent_of_measurements() -> None:
    rows = [row for row in json.loads(MEASUREMENTS.read_text()) if row["gpu"] == "h200" and row["vocab_size"] == 50257]
    for row in rows:
        config = ModelConfig(**{key: row[key] for key in attrs.fields_dict(ModelConfig) if key in row})
        assert 0.9 < roofline(config, known_gpus()["h200"]) / row["tokens_per_second"] <= 1
    assert len(rows) == 4


def test_no_published_number_is_above_the_bound() -> None:
    # The numbers of llm.c, and the numbers in docs/performance.md
    published = [*LLM_C, ("h100-80gb", "124M", 473e3), ("h100-80gb", "774M", 78.6e3), ("h100-80gb", "1.5B", 48.5e3)]
    for gpu, size, tokens_per_second in published:
        assert tokens_per_second < bound(GPT2_SIZES[size], gpu)
    for row in json.loads(MEASUREMENTS.read_text()):
        config = ModelConfig(**{key: row[key] for key in attrs.fields_dict(ModelConfig) if key in row})
        assert row["tokens_per_second"] < row["gpus"] * bound(config, row["gpu"])


# Bytes per token, layer and channel, counted by benchmarks/kernel_bytes.py on emulated GPUs for 124M networks
ROTARY = {"positions": "rope", "qk_norm": True, "biases": False}


@pytest.mark.parametrize(
    ("options", "counted_bytes"),
    [
        ({}, LAYER_BYTES),
        (ROTARY | {"activation": "relu2", "n_heads": 6}, 215.0),  # NanoChat's shape
        (ROTARY | {"activation": "swiglu", "mlp_width": 2048, "n_kv_heads": 4}, 184.7),  # Qwen3's shape
    ],
)
def test_bytes_of_a_block_equal_the_kernel_count(options: dict[str, Any], counted_bytes: float) -> None:
    config = attrs.evolve(GPT2_SIZES["124M"], **options)
    assert block_traffic(config) / config.emb_dim == pytest.approx(counted_bytes, rel=0.03 if options else 1e-12)


def test_measured_throughput_precedes_the_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2_SIZES["124M"]
    machine = Machine(name="mine", gpu=known_gpus()["b200"], gpus=8, usd_per_hour=1.0)
    assert throughputs(config, attrs.evolve(machine, gpus=2))[0].kind == "rough"
    assert throughputs(config, machine)[0].trainer == "gpjt/ddp-base-model-from-scratch"
    rows = json.loads(MEASUREMENTS.read_text())
    [gpjt_row] = [row for row in rows if row["gpu"] == "b200"]
    lockstep_row = gpjt_row | {"trainer": OURS, "tokens_per_second": 5e6}
    quickstart = load_run(ROOT / "runs" / "quickstart", []).model
    h200 = attrs.evolve(machine, gpu=known_gpus()["h200"], gpus=1)
    assert [throughput.tokens_per_second for throughput in throughputs(quickstart, h200, 2048)] == [32000]
    assert throughputs(quickstart, h200, 4096) == throughputs(quickstart, machine, 2048) == []
    monkeypatch.setattr("training.planning.throughput.MEASUREMENTS", tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps([*rows, lockstep_row]))
    assert [row.tokens_per_second for row in throughputs(config, machine)] == [5e6]
    assert throughputs(GPT2_SIZES["350M"], machine)[0].trainer is None
    assert throughputs(attrs.evolve(config, positions="rope"), machine)[0].trainer is None  # another network
    entered = attrs.evolve(machine, tokens_per_second=6e6)
    assert attrs.astuple(throughputs(config, entered)[0]) == (6e6, "measured here", None)


def train_config(**keys: Any) -> TrainConfig:
    return TrainConfig.from_keys({"dataset": "text", "microbatch_size": 1} | keys, Path("train.json"))


def received_bytes(config: ModelConfig, train: TrainConfig, sequences: int) -> int:
    """Return the bytes that a rank's collectives receive from other ranks in a forward and a backward pass."""
    shards, ranks, sizes = train.execution.shards, train.execution.tensor_parallel, []

    def output_of(tensors: list[torch.Tensor]) -> torch.Tensor:
        output = torch.cat(tensors)
        sizes.append(output.nbytes * (ranks - 1) // ranks)
        return output

    gather, transpose = lambda local: output_of([local] * ranks), lambda parts: output_of([parts])
    local_shards = range(shards // ranks)
    exchange = ShardExchange(shards=shards, local_shards=local_shards, all_gather=gather, all_to_all=transpose)
    network, memory = ShardedGPT(config, exchange).to_empty(device="cpu"), train.memory
    tokens = torch.zeros(sequences, config.context_length, dtype=torch.int64)
    loss = ShardedLoss(network, recompute_blocks=memory.recompute_blocks, chunks=memory.loss_chunks)
    with torch.autocast("cpu", torch.bfloat16, enabled=train.execution.precision != "fp32"):
        loss(tokens, tokens).backward()
    return sum(sizes)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("memory", [{}, {"recompute_blocks": True}, {"loss_chunks": 4}])
@pytest.mark.parametrize(("shards", "ranks"), [(2, 2), (4, 2), (4, 1)])
def test_exchange_bytes_equal_those_of_the_collectives(
    shards: int, ranks: int, memory: dict[str, Any], precision: str
) -> None:
    train = train_config(tensor_parallel=ranks, tensor_shards=shards, precision=precision, **memory)
    for drop_rate in (0.0, 0.1):
        config = ModelConfig(**TINY_MODEL | {"n_heads": 4, "drop_rate": drop_rate})
        assert 2 * config.context_length * exchange_bytes(config, train) == received_bytes(config, train, 2)


def test_tensor_parallel_is_slower_without_nvlink() -> None:
    config = GPT2_SIZES["774M"]
    for name, least, most in (("a100-80gb", 0.85, 0.95), ("a100-pcie-80gb", 0.3, 0.4)):
        gpu = known_gpus()[name]
        alone, two, four = (roofline(config, gpu, train_config(tensor_parallel=ranks)) for ranks in (1, 2, 4))
        assert alone == roofline(config, gpu) and least < two / alone < most and four < two
