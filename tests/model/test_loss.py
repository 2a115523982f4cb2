"""Training loss: its value, by sequence and in chunks, and the backward pass of recomputed blocks."""

import math
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import TypeCheckError

from model.config import ModelConfig
from model.gpt import GPT, HeadOptions, initialize
from model.loss import NextTokenLoss, head_loss, sequence_losses
from tests.model.architectures import MODERN
from tests.model.test_gpt import SMALL
from tests.model.test_naming import network


def training_loss(**options: Any) -> NextTokenLoss:
    network = GPT(SMALL)
    initialize(network, 1)
    return NextTokenLoss(network, **options)


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SMALL.vocab_size, (size, SMALL.context_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_loss_of_a_fresh_model_is_near_that_of_guessing() -> None:
    assert training_loss()(*batch()).item() == pytest.approx(math.log(SMALL.vocab_size), abs=0.15)


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_loss_is_the_cross_entropy_of_the_logits_and_the_mean_of_the_sequences(chunks: int) -> None:
    model = training_loss(chunks=chunks)
    inputs, targets = batch()
    with torch.no_grad():
        losses = F.cross_entropy(model.network(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        assert torch.allclose(model(inputs, targets), losses.mean())
        assert torch.allclose(model(inputs, targets, by_sequence=True), losses.view(targets.shape).mean(dim=1))


@pytest.mark.parametrize("chunks", [1, 3])
def test_weights_multiply_each_target_s_loss_and_those_of_one_change_nothing_but_rounding(chunks: int) -> None:
    model = training_loss(chunks=chunks)
    inputs, targets = batch()
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = F.cross_entropy(model.network(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        assert torch.allclose(model(inputs, targets, weights), (losses * weights.flatten()).mean())
    gradients = []
    for given in (None, torch.ones(targets.shape)):
        model.zero_grad()
        model(inputs, targets, given).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", [{}, {"chunks": 3}, {"recompute_blocks": True}])
def test_tokens_of_weight_0_have_no_gradient_and_their_targets_change_no_bit(
    options: dict[str, Any], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = training_loss(**options).train(), []
    hidden: Any = []
    plain = model.network.hidden
    monkeypatch.setattr(model.network, "hidden", lambda *a, **b: hidden.append(plain(*a, **b)) or hidden[-1])
    inputs, targets = batch()
    counts = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    for wanted in (targets, torch.where(counts, targets, (targets + 1) % SMALL.vocab_size)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs, wanted, counts.float())
        hidden[-1].retain_grad()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        assert not hidden[-1].grad[~counts].any() and hidden[-1].grad[counts].any(dim=1).all()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_padded_rows_of_the_head_do_not_count() -> None:
    hidden, weight, targets = torch.randn(4, 7, 5), torch.randn(16, 5), torch.randint(11, (4, 7))
    by_hand = -torch.log_softmax((hidden @ weight.T)[..., :11], -1).gather(-1, targets[..., None]).squeeze(-1)
    options = HeadOptions(vocabulary_size=11)
    mean = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), options, "mean")
    assert torch.allclose(mean, by_hand.mean())
    assert torch.allclose(sequence_losses(hidden, weight, targets, options), by_hand.mean(dim=1))


def test_recomputed_blocks_run_again_in_the_backward_pass_of_training_only() -> None:
    model, runs = training_loss(recompute_blocks=True), []
    model.network.blocks[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model(*batch()).backward()
    assert len(runs) == 2
    model.eval()
    model(*batch()).backward()
    assert len(runs) == 3


def test_a_shape_that_would_broadcast_is_refused() -> None:
    inputs, targets = batch()
    with pytest.raises(TypeCheckError):
        training_loss()(inputs, targets[:, :-1])


@pytest.mark.parametrize("config", [attrs.evolve(SMALL, drop_rate=0.2), *MODERN.values()], ids=["dropout", *MODERN])
def test_chunks_and_recomputed_blocks_change_nothing_with_any_option(config: ModelConfig) -> None:
    found = []
    for chunks, recompute in [(1, False), (1, True), (5, False), (1000, False)]:
        model = NextTokenLoss(network(config), chunks=chunks, recompute_blocks=recompute).train()
        torch.manual_seed(0)
        loss = model(*batch())
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    plain, recomputed, *in_chunks = found
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
    for chunked in in_chunks:
        assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(plain, chunked, strict=True))


def test_a_softcap_bounds_the_logits_of_the_loss() -> None:
    model = network(attrs.evolve(MODERN["NanoChat"], logit_softcap=0.5))
    inputs, targets = batch()
    with torch.no_grad():
        bare = F.linear(model.hidden(inputs), model.output_weight())[..., : SMALL.vocab_size]
        wanted = 0.5 * torch.tanh(bare / 0.5)
        assert torch.equal(model(inputs), wanted)
        loss = F.cross_entropy(wanted.flatten(0, 1), targets.flatten())
        assert torch.equal(NextTokenLoss(model)(inputs, targets), loss)
