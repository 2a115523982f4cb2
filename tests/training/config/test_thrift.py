"""Less memory for more time: the loss in chunks, blocks that are run again. The same result, fewer bytes."""

import gc
from collections.abc import Callable
from pathlib import Path
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
from tests.conftest import TINY_MODEL, metrics, train
from training.config.key_groups import MemoryOptions
from training.hardware.gpus import known_gpus
from training.planning.memory_model import PLAIN, THRIFTY, MemoryModel, gpu_bytes

CONFIG = ModelConfig(**TINY_MODEL | {"n_layers": 3})
ELASTIC_LAYOUTS = [(1, "ddp"), (2, "ddp"), (2, "fsdp")]


def network(config: ModelConfig, **options: Any) -> NextTokenLoss:
    made = GPT(config)
    initialize(made, 0)
    return NextTokenLoss(made, **options)


def batch(microbatch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, microbatch_size, CONFIG.context_length)
    inputs, targets = torch.randint(CONFIG.vocab_size, shape, generator=generator)
    return inputs, targets


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [2, 5, 1000])
def test_a_loss_in_chunks_is_the_plain_one_and_so_are_its_gradients(chunks: int, tied: bool) -> None:
    plain, chunked = (network(attrs.evolve(CONFIG, tie_weights=tied), chunks=count) for count in (1, chunks))
    inputs, targets = batch(3)
    wanted = plain(inputs, targets)
    loss = chunked(inputs, targets)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    wanted.backward()
    loss.backward()
    for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-7)


def live_bytes(microbatch_size: int, options: MemoryOptions) -> int:
    """Return what is alive between a bf16 forward pass and its backward pass, beside parameters, tokens, result."""
    made = network(CONFIG, recompute_blocks=options.recompute_blocks, chunks=options.loss_chunks)
    inputs, targets = batch(microbatch_size)
    before = living_storages()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        if options.loss_chunks > 1:
            result = made(inputs, targets)
        else:
            result = F.linear(made.hidden(inputs), made.network.output_weight())
    after = living_storages()
    return sum(after[address] for address in after.keys() - before.keys() - {result.untyped_storage().data_ptr()})


def living_storages() -> dict[int, int]:
    """Return address and bytes of all memory that Python's tensors hold."""
    gc.collect()
    storages = [value.untyped_storage() for value in gc.get_objects() if type(value) in (torch.Tensor, Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize("microbatch_size", [1, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [1, 4])
def test_predicted_activations_are_what_is_alive_before_the_backward_pass(
    microbatch_size: int, recompute: bool, chunks: int
) -> None:
    def kept(config: ModelConfig, options: MemoryOptions) -> int:
        predicted = MemoryModel(model=config, options=options).predict(microbatch_size)
        return predicted.activations + predicted.copies

    options = MemoryOptions(loss_chunks=chunks, recompute_blocks=recompute)
    one_block = kept(CONFIG, MemoryOptions()) - kept(attrs.evolve(CONFIG, n_layers=2), MemoryOptions())
    later = one_block if recompute else 3 * 24  # insides of a block when its backward begins; attention's seeds
    later += 2 * CONFIG.padded_vocab_size * CONFIG.emb_dim if chunks > 1 else 0  # the head in bf16, likewise
    tokens = 8 * microbatch_size * CONFIG.context_length
    assert live_bytes(microbatch_size, options) == kept(CONFIG, options) - later - tokens


def test_no_logits_are_left_when_the_blocks_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    # What training/planning/memory_model.py counts on.
    made, (inputs, targets) = network(CONFIG), batch(2)
    plain, held, left = F.cross_entropy, [], []

    def noting(logits: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        held.append(StorageWeakRef(logits.untyped_storage()))
        return plain(logits, *arguments, **options)

    monkeypatch.setattr(F, "cross_entropy", noting)
    made.network.blocks[-1].mlp.down.bias.register_hook(lambda _: left.append(held[0].expired()))
    made(inputs, targets).backward()
    assert left == [True]


def test_what_is_thrifty_is_predicted_to_fit_more_often() -> None:
    sizes = [
        MemoryModel(model=GPT2_SIZES["124M"], options=options).largest_microbatch(
            gpu_bytes(known_gpus()["rtx3090-24gb"])
        )
        for options in (PLAIN, MemoryOptions(loss_chunks=8), THRIFTY)
    ]
    assert sizes == sorted(set(sizes))


def test_recomputed_blocks_change_no_bit_and_thrifty_runs_are_elastic(make_run: Callable[..., Path]) -> None:
    model = {"drop_rate": 0.1, "tie_weights": False}
    short = {"min_train_tokens": 4 * 8 * 32, "validation_interval": None}
    hashes = {}
    for name, chunks, recompute in (("plain", 1, False), ("blocks", 1, True), ("both", 3, True)):
        for ranks, parallel in ELASTIC_LAYOUTS if name == "both" else [(2, "fsdp")]:
            keys = {"loss_chunks": chunks, "recompute_blocks": recompute, "parallel": parallel}
            run = make_run(f"{name}-{ranks}-{parallel}", model, **keys, **short)
            done = train(run, "--hash-every", "1", ranks=ranks)
            assert done.returncode == 0, done.stderr
            hashes[name, ranks, parallel] = metrics(run, "state_sha256")
    assert hashes["blocks", 2, "fsdp"] == hashes["plain", 2, "fsdp"]
    both = [hashes[("both", *layout)] for layout in ELASTIC_LAYOUTS]
    assert both[0] == both[1] == both[2] != hashes["plain", 2, "fsdp"]
