"""Predicted memory equals the memory that a network really keeps, and gives the largest micro-batch that fits."""

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


def test_softcap_adds_its_tanh_to_the_logits() -> None:
    capped = attrs.evolve(TINY, logit_softcap=15.0)
    for chunks in (1, 4):
        options, tokens = MemoryOptions(loss_chunks=chunks), 4 * TINY.context_length // chunks
        without_cap, with_cap = (
            BatchMemory(MemoryModel(model=model, options=options), network_sizes(model), 4).head.backward
            for model in (TINY, capped)
        )
        assert 0 <= with_cap - without_cap <= 4 * TINY.vocab_size * tokens


def predicted_bytes(config: ModelConfig, microbatch_size: int, options: MemoryOptions = PLAIN) -> int:
    """Return the predicted bytes in use between the forward and the backward pass, for blocks that are not compiled."""
    batch = BatchMemory(
        MemoryModel(model=config, options=options), network_sizes(config, compiled=False), microbatch_size
    )
    return batch.kept + batch.head.copies


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", GPT2_SIZES)
def test_one_more_sequence_does_not_fit(size: str, kind: str) -> None:
    memory = MemoryModel(model=GPT2_SIZES[size], parallel=kind, world_size=8)
    for gpu in known_gpus().values():
        fits = memory.largest_microbatch(gpu_bytes(gpu))
        assert memory.predict((fits or 0) + 1).total > gpu_bytes(gpu)
        if fits is not None:
            assert memory.predict(fits).total <= gpu_bytes(gpu)


def make_loss(config: ModelConfig, **options: Any) -> NextTokenLoss:
    network = GPT(config)
    initialize(network, 0)
    return NextTokenLoss(network, **options)


def batch(microbatch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, microbatch_size, TINY.context_length)
    inputs, targets = torch.randint(TINY.vocab_size, shape, generator=generator)
    return inputs, targets


def live_bytes(config: ModelConfig, microbatch_size: int, options: MemoryOptions) -> int:
    """Return the bytes in use between a bf16 forward and backward pass.

    Parameters, tokens and the output are not counted.
    """
    gc.freeze()  # so that the search below skips the objects that exist already
    loss = make_loss(config, recompute_blocks=options.recompute_blocks, chunks=options.loss_chunks)
    inputs, targets = batch(microbatch_size)
    before = living_storages()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        if options.loss_chunks > 1:
            output = loss(inputs, targets)
        else:
            output = F.linear(loss.network.hidden(inputs, recompute=loss._recompute), loss.network.output_weight())
    after = living_storages()
    gc.unfreeze()
    return sum(after[address] for address in after.keys() - before.keys() - {output.untyped_storage().data_ptr()})


def living_storages() -> dict[int, int]:
    """Return the storages of all tensors in Python, as a mapping from address to number of bytes."""
    gc.collect()
    storages = [value.untyped_storage() for value in gc.get_objects() if type(value) in (torch.Tensor, Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize("microbatch_size", [*slow(1), 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("changes", [{}, {"tie_weights": False, "qkv_bias": False, "n_layers": 1}])
def test_predicted_activations_are_in_use_before_the_backward_pass(
    microbatch_size: int, recompute: bool, chunks: int, changes: dict[str, Any]
) -> None:
    config = attrs.evolve(TINY, **changes)
    options = MemoryOptions(loss_chunks=chunks, recompute_blocks=recompute)
    # Some predicted bytes are not in use at this moment: attention's seeds, which exist only on a GPU, and the head in
    # bf16, which is created when a chunk needs it.
    missing = 0 if recompute else config.n_layers * 24
    missing += 2 * config.padded_vocab_size * config.emb_dim if chunks > 1 else 0
    tokens = 8 * microbatch_size * TINY.context_length
    expected = predicted_bytes(config, microbatch_size, options) - missing - tokens
    assert live_bytes(config, microbatch_size, options) == expected


def test_logits_are_freed_before_the_blocks_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # training/planning/memory_model.py relies on this.
    loss, (inputs, targets) = make_loss(TINY), batch(2)
    cross_entropy, logits_storages, freed = F.cross_entropy, [], []

    def recording(logits: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        logits_storages.append(StorageWeakRef(logits.untyped_storage()))
        return cross_entropy(logits, *arguments, **options)

    monkeypatch.setattr(F, "cross_entropy", recording)
    loss.network.blocks[-1].mlp.down.bias.register_hook(lambda _: freed.append(logits_storages[0].expired()))
    loss(inputs, targets).backward()
    assert freed == [True]


ELASTIC = {"world_size": 8, "determinism": "elastic"}
SHARDED = {"world_size": 8, "parallel": "fsdp"}


# Peaks that benchmarks/emulated_steps.py measured for the H100 with torch 2.13.0. tests/cuda/test_memory_prediction.py
# covers all shapes.
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
def test_predicted_peaks_equal_measured_peaks(
    size: str, microbatch_size: int, accumulation: int, settings: dict[str, Any], gib: float
) -> None:
    memory = MemoryModel(model=GPT2_SIZES[size], accumulation=accumulation, **settings)
    assert memory.predict(microbatch_size).allocated / GIB == pytest.approx(gib, rel=0.01)


def test_larger_micro_batches_may_need_less_memory() -> None:
    # With smaller micro-batches, there are more partial sums.
    memory = MemoryModel(model=GPT2_SIZES["1.5B"], world_size=8, determinism="elastic", global_batch_size=512)
    assert memory.predict(2).total < memory.predict(1).total
    assert (memory.largest_microbatch(memory.predict(2).total) or 0) >= 2


# Peaks for 8 H100s, measured in the same way. The GPUs of a group share each layer; a group has `shared` GPUs.
@pytest.mark.parametrize(
    ("shared", "model", "size", "settings", "gib"),
    [
        (2, "124M", 16, {}, 4.782),
        (4, "350M", 16, {}, 6.529),
        (2, "124M", 32, {"options": MemoryOptions(recompute_blocks=True)}, 3.263),
        (2, "124M", 32, {"options": MemoryOptions(loss_chunks=8), "parallel": "fsdp"}, 6.737),
    ],
)
def test_predicted_peaks_of_tensor_ranks_equal_measured_peaks(
    shared: int, model: str, size: int, settings: dict[str, Any], gib: float
) -> None:
    ranks = {"world_size": 8, "tensor": (shared, shared)}
    memory = MemoryModel(model=GPT2_SIZES[model], **ranks, **settings)
    assert memory.predict(size).allocated / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("parallel", "world_size", "shared", "fsdp"),
    [("ddp", 16, 4, 1), ("fsdp", 16, 4, 4), ("hsdp", 16, 4, 2), ("hsdp", 16, 8, 1), ("fsdp", 4, 4, 1)],
)
def test_fsdp_shards_over_data_parallel_ranks(parallel: str, world_size: int, shared: int, fsdp: int) -> None:
    memory = MemoryModel(model=TINY, parallel=parallel, world_size=world_size, tensor=(shared, shared))
    assert (memory.shards, memory.sharded) == (fsdp, fsdp > 1)
    assert attrs.evolve(memory, global_batch_size=48).accumulation_at(3) == 16 * shared // world_size


def test_memory_options_allow_a_larger_micro_batch() -> None:
    limit = gpu_bytes(known_gpus()["rtx3090-24gb"])
    memories = [
        MemoryModel(model=GPT2_SIZES["124M"], options=options)
        for options in (PLAIN, MemoryOptions(loss_chunks=8), THRIFTY)
    ]
    plain, chunked, thrifty = (memory.largest_microbatch(limit) or 0 for memory in memories)
    assert 0 < plain < chunked < thrifty
