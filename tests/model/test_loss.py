"""The training loss: its value for a batch, by sequence and in chunks, and the backward pass of recomputed blocks."""

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


def test_initial_loss_is_near_that_of_guessing() -> None:
    assert training_loss()(*batch()).item() == pytest.approx(math.log(SMALL.vocab_size), abs=0.15)


@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_is_the_mean_cross_entropy(chunks: int) -> None:
    model = training_loss(chunks=chunks)
    inputs, targets = batch()
    with torch.no_grad():
        losses = F.cross_entropy(model.network(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        assert torch.allclose(model(inputs, targets), losses.mean())
        assert torch.allclose(model(inputs, targets, by_sequence=True), losses.view(targets.shape).mean(dim=1))


@pytest.mark.parametrize("chunks", [1, 3])
def test_token_weights_multiply_the_loss_of_each_target(chunks: int) -> None:
    model = training_loss(chunks=chunks)
    inputs, targets = batch()
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = F.cross_entropy(model.network(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        assert torch.allclose(model(inputs, targets, weights), (losses * weights.flatten()).mean())
    gradients = []
    for token_weights in (None, torch.ones(targets.shape)):
        model.zero_grad()
        model(inputs, targets, token_weights).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for unweighted, weighted in zip(*gradients, strict=True):
        assert torch.allclose(unweighted, weighted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", [{}, {"chunks": 3}, {"recompute_blocks": True}])
def test_targets_of_weight_zero_change_no_bit(
    options: dict[str, Any], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, outcomes = training_loss(**options).train(), []
    hidden: Any = []
    compute_hidden = model.network.hidden
    monkeypatch.setattr(model.network, "hidden", lambda *a, **b: hidden.append(compute_hidden(*a, **b)) or hidden[-1])
    inputs, targets = batch()
    is_target = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    for variant in (targets, torch.where(is_target, targets, (targets + 1) % SMALL.vocab_size)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs, variant, is_target.float())
        hidden[-1].retain_grad()
        loss.backward()
        outcomes.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        assert not hidden[-1].grad[~is_target].any() and hidden[-1].grad[is_target].any(dim=1).all()
    assert all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))


def test_padded_rows_of_the_head_are_ignored() -> None:
    hidden, weight, targets = torch.randn(4, 7, 5), torch.randn(16, 5), torch.randint(11, (4, 7))
    by_hand = -torch.log_softmax((hidden @ weight.T)[..., :11], -1).gather(-1, targets[..., None]).squeeze(-1)
    options = HeadOptions(vocabulary_size=11)
    mean = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), options, "mean")
    assert torch.allclose(mean, by_hand.mean())
    assert torch.allclose(sequence_losses(hidden, weight, targets, options), by_hand.mean(dim=1))


def test_blocks_are_recomputed_only_in_training() -> None:
    model, runs = training_loss(recompute_blocks=True), []
    model.network.blocks[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model(*batch()).backward()
    assert len(runs) == 2
    model.eval()
    model(*batch()).backward()
    assert len(runs) == 3


def test_shapes_that_would_broadcast_are_refused() -> None:
    inputs, targets = batch()
    with pytest.raises(TypeCheckError):
        training_loss()(inputs, targets[:, :-1])


@pytest.mark.parametrize("config", [attrs.evolve(SMALL, drop_rate=0.2), *MODERN.values()], ids=["dropout", *MODERN])
def test_chunks_and_recomputation_do_not_change_gradients(config: ModelConfig) -> None:
    outcomes = []
    for chunks, recompute in [(1, False), (1, True), (5, False), (1000, False)]:
        model = NextTokenLoss(network(config), chunks=chunks, recompute_blocks=recompute).train()
        torch.manual_seed(0)
        loss = model(*batch())
        loss.backward()
        outcomes.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    plain, recomputed, *in_chunks = outcomes
    assert all(torch.equal(*pair) for pair in zip(plain, recomputed, strict=True))
    for chunked in in_chunks:
        assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(plain, chunked, strict=True))


def test_loss_uses_capped_logits() -> None:
    model = network(attrs.evolve(MODERN["NanoChat"], logit_softcap=0.5))
    inputs, targets = batch()
    with torch.no_grad():
        bare = F.linear(model.hidden(inputs), model.output_weight())[..., : SMALL.vocab_size]
        capped = 0.5 * torch.tanh(bare / 0.5)
        assert torch.equal(model(inputs), capped)
        loss = F.cross_entropy(capped.flatten(0, 1), targets.flatten())
        assert torch.equal(NextTokenLoss(model)(inputs, targets), loss)
