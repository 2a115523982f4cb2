"""Predictions of memory count what the network really saves, and what fits is the most that fits."""

import gc
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from tests.conftest import TINY_MODEL, slow
from training.config.key_groups import MemoryOptions
from training.hardware.gpus import known_gpus
from training.planning.memory_model import GIB, PLAIN, THRIFTY, BatchMemory, MemoryModel, gpu_bytes
from training.planning.network_sizes import network_sizes

TINY = ModelConfig(**TINY_MODEL | {"n_layers": 3})


def test_a_softcap_holds_its_tanh_beside_the_logits_of_a_chunk() -> None:
    capped = attrs.evolve(TINY, logit_softcap=15.0)
    for chunks in (1, 4):
        options, tokens = MemoryOptions(loss_chunks=chunks), 4 * TINY.context_length // chunks
        plain, more = (
            BatchMemory(MemoryModel(model=model, options=options), network_sizes(model), 4).head.backward
            for model in (TINY, capped)
        )
        assert 0 <= more - plain <= 4 * TINY.vocab_size * tokens


def kept(config: ModelConfig, microbatch_size: int, options: MemoryOptions = PLAIN) -> int:
    """Return the predicted bytes between forward and backward pass, of blocks that are not compiled."""
    batch = BatchMemory(
        MemoryModel(model=config, options=options), network_sizes(config, compiled=False), microbatch_size
    )
    return batch.kept + batch.head.copies


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", GPT2_SIZES)
def test_what_fits_fits_and_one_more_does_not(size: str, kind: str) -> None:
    memory = MemoryModel(model=GPT2_SIZES[size], parallel=kind, world_size=8)
    for gpu in known_gpus().values():
        fits = memory.largest_microbatch(gpu_bytes(gpu))
        assert memory.predict((fits or 0) + 1).total > gpu_bytes(gpu)
        if fits is not None:
            assert memory.predict(fits).total <= gpu_bytes(gpu)


def network(config: ModelConfig, **options: Any) -> NextTokenLoss:
    made = GPT(config)
    initialize(made, 0)
    return NextTokenLoss(made, **options)


def batch(microbatch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, microbatch_size, TINY.context_length)
    inputs, targets = torch.randint(TINY.vocab_size, shape, generator=generator)
    return inputs, targets


def live_bytes(config: ModelConfig, microbatch_size: int, options: MemoryOptions) -> int:
    """Return what is alive between a bf16 forward pass and its backward pass, beside parameters, tokens, result."""
    gc.freeze()  # what is here already is not looked through
    made = network(config, recompute_blocks=options.recompute_blocks, chunks=options.loss_chunks)
    inputs, targets = batch(microbatch_size)
    before = living_storages()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        if options.loss_chunks > 1:
            result = made(inputs, targets)
        else:
            result = F.linear(made.network.hidden(inputs, recompute=made._recompute), made.network.output_weight())
    after = living_storages()
    gc.unfreeze()
    return sum(after[address] for address in after.keys() - before.keys() - {result.untyped_storage().data_ptr()})


def living_storages() -> dict[int, int]:
    """Return address and bytes of all memory that Python's tensors hold."""
    gc.collect()
    storages = [value.untyped_storage() for value in gc.get_objects() if type(value) in (torch.Tensor, Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize("microbatch_size", [*slow(1), 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("changes", [{}, {"tie_weights": False, "qkv_bias": False, "n_layers": 1}])
def test_predicted_activations_are_what_is_alive_before_the_backward_pass(
    microbatch_size: int, recompute: bool, chunks: int, changes: dict[str, Any]
) -> None:
    config = attrs.evolve(TINY, **changes)
    options = MemoryOptions(loss_chunks=chunks, recompute_blocks=recompute)
    later = 0 if recompute else config.n_layers * 24  # attention's seeds, on a GPU only
    later += (
        2 * config.padded_vocab_size * config.emb_dim if chunks > 1 else 0
    )  # the head in bf16, when a chunk needs it
    tokens = 8 * microbatch_size * TINY.context_length
    assert live_bytes(config, microbatch_size, options) == kept(config, microbatch_size, options) - later - tokens


def test_no_logits_are_left_when_the_blocks_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    # What training/planning/memory_model.py counts on.
    made, (inputs, targets) = network(TINY), batch(2)
    plain, held, left = F.cross_entropy, [], []

    def noting(logits: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        held.append(StorageWeakRef(logits.untyped_storage()))
        return plain(logits, *arguments, **options)

    monkeypatch.setattr(F, "cross_entropy", noting)
    made.network.blocks[-1].mlp.down.bias.register_hook(lambda _: left.append(held[0].expired()))
    made(inputs, targets).backward()
    assert left == [True]


ELASTIC = {"world_size": 8, "determinism": "elastic"}
SHARDED = {"world_size": 8, "parallel": "fsdp"}


# benchmarks/emulated_steps.py's peaks on the H100, torch 2.13.0; for all shapes: tests/cuda/test_memory_prediction.py.
@pytest.mark.parametrize(
    ("size", "microbatch_size", "accumulation", "settings", "gib"),
    [
        ("124M", 16, 2, {}, 8.619),
        ("124M", 64, 1, {}, 27.467),
        ("124M", 32, 2, {"options": MemoryOptions(recompute_blocks=True)}, 6.421),
        ("124M", 32, 2, {"options": MemoryOptions(loss_chunks=8)}, 12.598),
        ("124M", 64, 2, {"options": THRIFTY}, 6.205),
        ("350M", 32, 2, {}, 34.952),
        ("124M", 16, 1, {"world_size": 8}, 8.618),
        ("124M", 16, 8, ELASTIC, 10.011),
        ("124M", 16, 1, SHARDED, 7.099),
        ("124M", 16, 4, SHARDED | ELASTIC, 8.013),
        ("774M", 16, 2, SHARDED | {"options": MemoryOptions(recompute_blocks=True)}, 9.054),
        ("1.5B", 8, 2, SHARDED, 32.204),
        ("1.5B", 8, 8, SHARDED | ELASTIC, 43.810),
    ],
)
def test_the_largest_moment_is_the_measured_peak(
    size: str, microbatch_size: int, accumulation: int, settings: dict[str, Any], gib: float
) -> None:
    memory = MemoryModel(model=GPT2_SIZES[size], accumulation=accumulation, **settings)
    assert memory.predict(microbatch_size).allocated / GIB == pytest.approx(gib, rel=0.01)


def test_a_larger_micro_batch_may_fit_where_a_smaller_one_has_more_sums() -> None:
    memory = MemoryModel(model=GPT2_SIZES["1.5B"], world_size=8, determinism="elastic", global_batch_size=512)
    assert memory.predict(2).total < memory.predict(1).total
    assert (memory.largest_microbatch(memory.predict(2).total) or 0) >= 2


# As above, on 8 H100s, of which so many share layers.
@pytest.mark.parametrize(
    ("shared", "model", "size", "settings", "gib"),
    [
        (2, "124M", 16, {}, 4.782),
        (4, "350M", 16, {}, 6.529),
        (2, "124M", 32, {"options": MemoryOptions(recompute_blocks=True)}, 3.263),
        (2, "124M", 32, {"options": MemoryOptions(loss_chunks=8), "parallel": "fsdp"}, 6.737),
    ],
)
def test_the_peak_of_a_tensor_rank_is_the_measured_one(
    shared: int, model: str, size: int, settings: dict[str, Any], gib: float
) -> None:
    ranks = {"world_size": 8, "tensor": (shared, shared)}
    memory = MemoryModel(model=GPT2_SIZES[model], **ranks, **settings)
    assert memory.predict(size).allocated / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("parallel", "world_size", "shared", "fsdp"),
    [("ddp", 16, 4, 1), ("fsdp", 16, 4, 4), ("hsdp", 16, 4, 2), ("hsdp", 16, 8, 1), ("fsdp", 4, 4, 1)],
)
def test_fsdp_divides_among_data_parallel_ranks(parallel: str, world_size: int, shared: int, fsdp: int) -> None:
    memory = MemoryModel(model=TINY, parallel=parallel, world_size=world_size, tensor=(shared, shared))
    assert (memory.shards, memory.sharded) == (fsdp, fsdp > 1)
    assert attrs.evolve(memory, global_batch_size=48).accumulation_at(3) == 16 * shared // world_size


def test_memory_options_let_a_larger_micro_batch_fit() -> None:
    limit = gpu_bytes(known_gpus()["rtx3090-24gb"])
    options = (PLAIN, MemoryOptions(loss_chunks=8), THRIFTY)
    sizes = [MemoryModel(model=GPT2_SIZES["124M"], options=each).largest_microbatch(limit) or 0 for each in options]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
