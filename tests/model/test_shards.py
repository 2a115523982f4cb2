"""Tensor shards: loss and gradients equal those of the plain network, and shards cover every parameter.

Other tests check dropout, and which networks are refused.
"""

from functools import partial
from itertools import product
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.errors import BadInput
from model.axes import ShardCut, axes_of, plain_name, shard_cut
from model.config import ModelConfig, indivisible_sizes
from model.counts import meta_network
from model.gpt import GPT, Block
from model.loss import NextTokenLoss
from model.sharded_loss import ShardedLoss
from model.shards import ShardedGPT, ShardExchange
from tests.model.architectures import CASES, MODERN
from tests.model.test_gpt import SMALL
from tests.model.test_naming import network
from training.parallel.mesh import within

PADDED = attrs.evolve(SMALL, vocab_size=90, tie_weights=False)  # the last of four shards consists of padding
FEW = MODERN | {"GPT-2": SMALL, "padding": PADDED}
ALL = FEW | {str(number): attrs.evolve(SMALL, **options) for number, (_, options) in enumerate(CASES)}
OPTIONS: list[dict[str, Any]] = [{}, {"chunks": 3}, {"recompute_blocks": True}]


def part_of(parameter: torch.Tensor, cut: ShardCut) -> torch.Tensor:
    """Return a shard's part of a parameter."""
    return torch.cat([within(parameter, run.rows, cut.columns) for run in cut.rows])


def cuts_of(network: ShardedGPT) -> dict[str, ShardCut]:
    shards, places = network.exchange.shards, {name: int(name.split(".")[1]) for name, _ in network.named_parameters()}
    return {name: shard_cut(axes_of(plain_name(name), network.config), shards, places[name]) for name in places}


def in_shards(plain_network: GPT, shards: int, **options: Any) -> ShardedLoss:
    """Split the network and its weights into shards in this process. Return the module that computes the loss."""
    network = ShardedGPT(plain_network.config, ShardExchange(shards=shards, local_shards=range(shards)))
    parts = {
        name: part_of(plain_network.get_parameter(plain_name(name)), cut) for name, cut in cuts_of(network).items()
    }
    network.load_state_dict({name: part.detach() for name, part in parts.items()}, assign=True, strict=False)
    return ShardedLoss(network.requires_grad_(), **options)


def whole_gradients(model: ShardedLoss) -> dict[str, torch.Tensor]:
    """Return the sum of the shards' gradients for each parameter of the plain network."""
    totals: dict[str, torch.Tensor] = {}
    for name, cut in cuts_of(model.network).items():
        gradient, plain = model.network.get_parameter(name).grad, plain_name(name)
        total = totals.setdefault(plain, gradient.new_zeros(axes_of(plain, model.network.config).shape))
        for place, run in cut.whole_rows(0, len(gradient)):
            within(total, run.rows, cut.columns).add_(gradient[place])
    return totals


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (3, config.context_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("name", "shards", "options"),
    [(name, 4, OPTIONS[0]) for name in ALL] + [case for case in product(FEW, (2, 4), OPTIONS) if case[1:] != (4, {})],
)
def test_loss_and_gradients_equal_the_plain_networks(
    monkeypatch: pytest.MonkeyPatch, name: str, shards: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # compute in fp64 what training computes in fp32
    config = attrs.evolve(ALL[name], drop_rate=0.0, context_length=16, n_layers=2)
    assert indivisible_sizes(config, shards) == {}
    plain_network = network(config).double()
    plain, sharded = (
        NextTokenLoss(plain_network, **options).train(),
        in_shards(plain_network, shards, **options).train(),
    )
    weights = torch.rand(3, config.context_length, dtype=torch.float64) if options else None
    inputs, targets = batch(config)
    losses = plain(inputs, targets, weights), sharded(inputs, targets, weights)
    assert losses[1].dtype == torch.float64
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    gradients = whole_gradients(sharded)
    assert gradients.keys() == dict(plain_network.named_parameters()).keys()
    for key, parameter in plain_network.named_parameters():
        assert (gradients[key] - parameter.grad).norm() <= 1e-10 * parameter.grad.norm(), key
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
def test_dropout_masks_differ_by_shard_and_repeat(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    config, seeds = attrs.evolve(config, drop_rate=0.2, context_length=16, n_layers=2), []

    def recording(function: Any, *arguments: Any, **keys: Any) -> Any:
        seeds.append(torch.initial_seed())
        return function(*arguments, **keys)

    for name in ("dropout", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, partial(recording, getattr(F, name)))
    gradients = gradient_bits(config, 1)
    first_seeds = set(seeds)
    # Dropout is applied after the embedding and, in each block, inside attention, after attention and after the MLP.
    assert len(seeds) == len(first_seeds) == 4 * (1 + 3 * config.n_layers)
    seeds.clear()
    recomputed_gradients = gradient_bits(config, 1, recompute_blocks=True)
    assert set(seeds) == first_seeds and len(seeds) == 4 * (1 + 6 * config.n_layers)
    seeds.clear()
    other_gradients = gradient_bits(config, 1000)
    assert not first_seeds & set(seeds)
    for first, recomputed, differing in zip(gradients, recomputed_gradients, other_gradients, strict=True):
        assert torch.equal(first, recomputed) and not torch.equal(first, differing)


OPTION_VALUES: list[Any] = [
    True,
    False,
    2,
    8,
    96,
    0.25,
    30.0,
    500.0,
    "gelu",
    "relu2",
    "swiglu",
    "rmsnorm",
    "rope",
    "none",
]


def changed_configurations() -> dict[str, ModelConfig]:
    """Return variants of GPT-2 and NanoChat, each with one option changed; together they cover all accepted values."""
    starts, configurations = {"GPT-2": SMALL, "NanoChat": MODERN["NanoChat"]}, {}
    options = [name for name in attrs.fields_dict(ModelConfig) if name != "drop_rate"]  # dropout has its own test
    for (start, config), option, value in product(starts.items(), options, OPTION_VALUES):
        try:
            changed = attrs.evolve(config, **{option: value})
        except ValueError:  # the value is invalid for this option, or contradicts another option
            continue
        if changed != config and not indivisible_sizes(changed, 2):
            configurations[f"{start}, {option} {value}"] = changed
    return configurations


def test_every_option_has_the_same_loss_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # compute in fp64 what training computes in fp32
    configurations = changed_configurations()
    changed_options = {name.split()[-2] for name in configurations}
    assert attrs.fields_dict(ModelConfig).keys() - changed_options == {"drop_rate"}
    for name, config in configurations.items():
        plain_network = network(config).double()
        inputs, targets = batch(config)
        losses = [model(inputs, targets) for model in (NextTokenLoss(plain_network), in_shards(plain_network, 2))]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0, msg=name)


def parallel_forward(block: Block, x: Any, rotation: Any = None, cache: Any = None) -> Any:
    """Compute a block in which attention and MLP read the same input, as in GPT-J.

    This is an example of a new option.
    """
    attention = block.attention(block.attention_norm(x), rotation, cache)
    return 0.5 * x + block.attention_dropout(attention) + block.mlp_dropout(block.mlp(block.mlp_norm(x)))


@pytest.mark.parametrize("name", ["GPT-2", "NanoChat"])
def test_changes_to_the_forward_pass_apply_to_shards(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    plain_network = network(attrs.evolve(FEW[name], drop_rate=0.0)).double()
    models, (inputs, targets) = (NextTokenLoss(plain_network), in_shards(plain_network, 2)), batch(plain_network.config)
    before = models[0](inputs, targets)
    monkeypatch.setattr(Block, "forward", parallel_forward)
    losses = [model(inputs, targets) for model in models]
    assert abs(losses[0] - before) > 1e-3
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)


def test_flags_of_a_block_are_copied_to_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_init = Block.__init__

    def flagged(block: Block, *arguments: Any) -> None:
        plain_init(block, *arguments)
        block.parallel = True  # type: ignore[assignment]

    monkeypatch.setattr(Block, "__init__", flagged)
    with torch.device("meta"):
        sharded = ShardedGPT(SMALL, ShardExchange(shards=2, local_shards=range(2)))
    assert [block.parallel for block in sharded.blocks] == [True] * SMALL.n_layers


@pytest.mark.parametrize("module", [Block, GPT])
def test_layers_unknown_to_shards_are_refused(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    plain_init = module.__init__

    def extended(network: Any, *arguments: Any) -> None:
        plain_init(network, *arguments)
        network.extra_norm = torch.nn.Identity()

    monkeypatch.setattr(module, "__init__", extended)
    where = {Block: "blocks.0.extra_norm", GPT: "the network.extra_norm"}[module]
    with pytest.raises(BadInput, match=f"got 2 shards of a network with {where}, which .* does not compute"):
        ShardedGPT(SMALL, ShardExchange(shards=2, local_shards=range(2)))


def test_head_options_unknown_to_shards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = ShardedGPT(PADDED, ShardExchange(shards=2, local_shards=range(2)))
    assert ShardedLoss(sharded).chunks == 1
    monkeypatch.setattr("model.sharded_loss.SHARDED_HEAD_OPTIONS", ("vocabulary_size",))
    assert ShardedLoss(sharded).chunks == 1  # the network has no softcap
    softcapped = ShardedGPT(attrs.evolve(PADDED, logit_softcap=2.0), ShardExchange(shards=2, local_shards=range(2)))
    with pytest.raises(BadInput, match=r"head has softcap 2\.0, which shard_losses .* does not compute"):
        ShardedLoss(softcapped)


HEADS = st.sampled_from([(4, None), (4, 2), (4, 1), (8, 4), (8, 2), (6, 3), (6, 1), (2, 1)])


@settings(max_examples=30)
@given(HEADS, st.sampled_from([1, 2, 3, 4, 6, 8]), st.booleans(), st.integers(0, 40), st.integers(0, 40))
def test_shard_cuts_cover_every_parameter(
    heads: tuple[int, int | None], shards: int, tied: bool, first: int, count: int
) -> None:
    options: dict[str, Any] = {"mlp_width": 48, "activation": "swiglu", "tie_weights": tied}
    config = attrs.evolve(SMALL, emb_dim=48, n_heads=heads[0], n_kv_heads=heads[1], n_layers=1, **options)
    assume(not any("heads" in name for name in indivisible_sizes(config, shards)))
    for name, _ in meta_network(config).named_parameters():
        axes = axes_of(name, config)
        parameter = torch.arange(torch.Size(axes.shape).numel()).view(axes.shape)
        copies, expected_copies = torch.zeros_like(parameter), torch.zeros_like(parameter)
        for shard in range(shards if "vocab" not in axes.row_names or 256 % shards == 0 else 0):
            cut = shard_cut(axes, shards, shard)
            part = part_of(parameter, cut)
            assert cut.shape == part.shape
            for run in cut.rows:
                region = within(copies, run.rows, cut.columns)
                assert region.shape[1:] == part.shape[1:]
                region += 1
                within(expected_copies, run.rows, cut.columns).fill_(run.holders)
            runs = list(cut.whole_rows(first, min(count, len(part) - first)))
            assert sum(len(run.rows) for _, run in runs) == max(0, min(count, len(part) - first))
            for place, run in runs:
                assert torch.equal(part[first:][place], within(parameter, run.rows, cut.columns))
        assert torch.equal(copies, expected_copies), name
        assert copies.min() > 0 or "vocab" in axes.row_names, name


@pytest.mark.parametrize(
    ("change", "shards", "sizes"),
    [
        ({"n_kv_heads": 2}, 4, {}),
        ({}, 8, {"n_heads": 4}),
        ({}, 3, {"padded_vocab_size": 256, "n_heads": 4, "hidden_width": 256, "kv_heads": 4}),
        ({"context_length": 50}, 4, {"context_length": 50}),
        ({"mlp_width": 102}, 4, {"hidden_width": 102}),
        ({"emb_dim": 60, "n_heads": 6, "n_kv_heads": 3}, 2, {"kv_heads": 3}),
    ],
)
def test_sizes_that_shards_cannot_divide_are_named(change: dict[str, Any], shards: int, sizes: dict[str, int]) -> None:
    assert indivisible_sizes(attrs.evolve(SMALL, **change), shards) == sizes
