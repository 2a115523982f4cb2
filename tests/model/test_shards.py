"""Tensor shards: the plain network's loss and gradients, cuts that cover each parameter, dropout by shard, refusals."""

from functools import partial
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from model.axes import ShardCut, axes_of, plain_name, shard_cut
from model.config import ModelConfig, undivided
from model.gpt import GPT
from model.loss import NextTokenLoss
from model.shards import ShardedGPT, ShardedLoss, ShardExchange
from tests.model.architectures import CASES, MODERN
from tests.model.test_gpt import SMALL
from tests.model.test_naming import network
from training.parallel.mesh import within

PADDED = attrs.evolve(SMALL, vocab_size=90, tie_weights=False)  # of four shards the last one has padding alone
CONFIGS = [attrs.evolve(SMALL, **options | {"drop_rate": 0.0}) for _, options in CASES]
FEW = MODERN | {"GPT-2": SMALL, "padding": PADDED}
OPTIONS: dict[str, dict[str, Any]] = {"chunks": {"chunks": 3}, "recomputed": {"recompute_blocks": True}}
DIVISOR = "; set tensor_parallel or tensor_shards in train.json to a divisor, the nearest: "


def part_of(whole: torch.Tensor, cut: ShardCut) -> torch.Tensor:
    """Return a shard's part of a parameter."""
    return torch.cat([within(whole, run.rows, cut.columns) for run in cut.rows])


def in_shards(whole: GPT, shards: int, **options: Any) -> ShardedLoss:
    """Return all shards of a network, in this process, with its weights."""
    sharded = ShardedGPT(whole.config, ShardExchange(shards=shards, local=shards))
    cut = {}
    for name, _ in sharded.named_parameters():
        plain, axes = plain_name(name), axes_of(plain_name(name), whole.config)
        cut[name] = part_of(whole.get_parameter(plain).detach(), shard_cut(axes, shards, int(name.split(".")[1])))
    sharded.load_state_dict({name: value.clone() for name, value in cut.items()}, assign=True, strict=False)
    assert not any(value.is_meta for value in sharded.parameters())
    return ShardedLoss(sharded.requires_grad_(), **options)


def whole_gradients(model: ShardedLoss) -> dict[str, torch.Tensor]:
    """Return the sums of the shards' gradients of each parameter of the plain network."""
    config, shards = model.network.config, model.network.exchange.shards
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.network.named_parameters():
        plain, gradient = plain_name(name), parameter.grad
        assert gradient is not None, name
        axes = axes_of(plain, config)
        total = found.setdefault(plain, gradient.new_zeros(axes.shape))
        cut = shard_cut(axes, shards, int(name.split(".")[1]))
        for place, run in cut.whole_rows(0, len(gradient)):
            within(total, run.rows, cut.columns).add_(gradient[place])
    return found


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (3, config.context_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        *(pytest.param(config, {}, id=str(number)) for number, config in enumerate(CONFIGS)),
        *(pytest.param(config, {}, id=name) for name, config in FEW.items()),
        *(pytest.param(FEW[name], OPTIONS[how], id=f"{name} {how}") for name in FEW for how in OPTIONS),
    ],
)
def test_loss_and_gradients_are_the_plain_networks_in_fp64(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, options: dict[str, Any], shards: int
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # what is done in fp32 in training
    assert list(undivided(config, shards)) == []
    whole = network(config).double()
    plain, sharded = NextTokenLoss(whole, **options).train(), in_shards(whole, shards, **options).train()
    weights = torch.rand(3, config.context_length, dtype=torch.float64) if options else None
    inputs, targets = batch(config)
    losses = plain(inputs, targets, weights), sharded(inputs, targets, weights)
    assert losses[1].dtype == torch.float64
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    found = whole_gradients(sharded)
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-10 * parameter.grad.norm(), name
    with torch.no_grad():
        by_sequence = [model.eval()(inputs, targets, weights, by_sequence=True) for model in (plain, sharded)]
    assert by_sequence[1].shape == (3,)
    torch.testing.assert_close(*by_sequence, rtol=1e-10, atol=0)


def gradient_bits(config: ModelConfig, seed: int, **options: Any) -> list[torch.Tensor]:
    model = in_shards(network(config), 4, **options).train()
    torch.manual_seed(seed)
    model(*batch(config)).backward()
    return list(whole_gradients(model).values())


@pytest.mark.parametrize("config", [SMALL, MODERN["NanoChat"]], ids=["GPT-2", "NanoChat"])
def test_each_dropout_of_each_shard_has_a_mask_of_its_own_which_repeats(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    config, seeds = attrs.evolve(config, drop_rate=0.2, n_layers=2), []

    def noting(plain: Any, *arguments: Any, **keys: Any) -> Any:
        seeds.append(torch.initial_seed())
        return plain(*arguments, **keys)

    for name in ("dropout", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, partial(noting, getattr(F, name)))
    first = gradient_bits(config, 1)
    drawn = set(seeds)
    assert len(seeds) == len(drawn) == 4 * (1 + 3 * config.n_layers)  # after embedding, in attention, after two layers
    seeds.clear()
    recomputed = gradient_bits(config, 1, recompute_blocks=True)
    assert set(seeds) == drawn and len(seeds) == 4 * (1 + 6 * config.n_layers)
    seeds.clear()
    other = gradient_bits(config, 1000)
    assert not drawn & set(seeds)
    for one, again, differing in zip(first, recomputed, other, strict=True):
        assert torch.equal(one, again) and not torch.equal(one, differing)


HEADS = st.sampled_from([(4, None), (4, 2), (4, 1), (8, 4), (8, 2), (6, 3), (6, 1), (2, 1)])


@settings(max_examples=30)
@given(HEADS, st.sampled_from([1, 2, 3, 4, 6, 8]), st.booleans(), st.integers(0, 40), st.integers(0, 40))
def test_the_parts_of_a_parameter_are_all_of_it_as_often_as_they_say(
    heads: tuple[int, int | None], shards: int, tied: bool, first: int, count: int
) -> None:
    options: dict[str, Any] = {"mlp_width": 48, "activation": "swiglu", "tie_weights": tied}
    config = attrs.evolve(SMALL, emb_dim=48, n_heads=heads[0], n_kv_heads=heads[1], n_layers=1, **options)
    assume(not any("heads" in refused for refused in undivided(config, shards)))
    with torch.device("meta"):
        names = [name for name, _ in GPT(config).named_parameters()]
    for name in names:
        axes = axes_of(name, config)
        whole = torch.arange(torch.Size(axes.shape).numel()).view(axes.shape)
        times, held = torch.zeros_like(whole), torch.zeros_like(whole)
        for shard in range(shards if "vocab" not in axes.row_names or 256 % shards == 0 else 0):
            cut = shard_cut(axes, shards, shard)
            part = part_of(whole, cut)
            assert cut.shape == part.shape
            for run in cut.rows:
                where = within(times, run.rows, cut.columns)
                assert where.shape[1:] == part.shape[1:]
                where += 1
                within(held, run.rows, cut.columns).fill_(run.holders)
            some = list(cut.whole_rows(first, min(count, len(part) - first)))
            assert sum(len(run.rows) for _, run in some) == max(0, min(count, len(part) - first))
            for place, run in some:
                assert torch.equal(part[first:][place], within(whole, run.rows, cut.columns))
        assert torch.equal(times, held), name
        assert times.min() > 0 or "vocab" in axes.row_names, name


@pytest.mark.parametrize(
    ("change", "shards", "refused"),
    [
        ({}, 4, []),
        ({"n_kv_heads": 2}, 4, []),
        ({"n_kv_heads": 1}, 4, []),
        ({}, 8, ["n_heads: got 4, of which 8 tensor shards have no equal part", "1, 2, 4"]),
        ({"context_length": 50}, 4, ["context_length: got 50, of which 4 tensor shards have no equal part", "1, 2, 5"]),
        ({"mlp_width": 102}, 4, ["mlp_width: got 102, of which 4 tensor shards have no equal part", "2, 3, 6"]),
        (
            {"emb_dim": 60, "n_heads": 6, "n_kv_heads": 3},
            2,
            ["n_kv_heads: got 3, of which 2 tensor shards have no equal part", "1, 3"],
        ),
    ],
)
def test_an_option_that_shards_cannot_share_is_refused_by_name(
    change: dict[str, Any], shards: int, refused: list[str]
) -> None:
    assert list(undivided(attrs.evolve(SMALL, **change), shards)) == ([DIVISOR.join(refused)] if refused else [])
