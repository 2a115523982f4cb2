"""Decoder-only transformer: token ids in, next-token logits out.

The network has pre-norm blocks with fused queries, keys and values. By default it is GPT-2 (Radford et al. 2019,
OpenAI's released code); the options of ModelConfig replace parts of the network when it is constructed.

`Block.forward` and `GPT.hidden` are the only description of the network's computation. Tensor shards (model/shards.py)
run the same two functions on layers that exchange their results. For this reason, these functions do nothing except
call layers, and add or multiply the results.

B micro-batch, T tokens, C embedding width, H heads, K key-value heads, D head width (C = H * D), V vocabulary, S tokens
of the text up to and including the new tokens.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.axes import axes_of, unpadded
from model.config import GATED, INITIAL_STD, ModelConfig

Rotation = Float[Tensor, "2 T _"] | None  # cosines and sines of RoPE's angles, (2, T, D / 2)
Recompute = Callable[..., Any]  # (block, the block's input, rotation) -> the block's output

INITIAL_POSITION_STD = 0.01  # standard deviation of the position embedding, as in OpenAI's model.py


class HeadOptions(NamedTuple):
    """Options of the output head, which determine how its matrix product becomes logits."""

    vocabulary_size: int  # the weight has a row for each token; all further rows are padding
    softcap: float | None = None  # a number c: each logit z becomes c tanh(z / c)


class Pieces(NamedTuple):
    """The residual stream in tensor shards (model/shards.py): a piece of each sequence for each shard of this process.

    Pieces can be added and multiplied like tensors, so `Block.forward` and `GPT.hidden` work with tensors and with
    pieces. Pieces are a tuple because PyTorch looks for the input and output tensors of a module inside tuples, for
    example in FSDP's hooks.
    """

    tensors: tuple[Float[Tensor, "B _ C"], ...]
    first_seed: int = 0  # determines the dropout masks of this pass

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pieces":
        return Pieces(tuple(function(tensor) for tensor in self.tensors), self.first_seed)

    def __add__(self, addends: "Pieces") -> "Pieces":  # type: ignore[override]  # a tuple's __add__ would append
        pairs = zip(self.tensors, addends.tensors, strict=True)
        return Pieces(tuple(piece + addend for piece, addend in pairs), self.first_seed)

    def __mul__(self, factor: float | Tensor) -> "Pieces":  # type: ignore[override]
        """Multiply by a number, or by a factor for each channel, (C,)."""
        return self.map(lambda piece: piece * factor)

    def __rmul__(self, factor: float) -> "Pieces":  # type: ignore[override]
        return self * factor

    def flatten(self, first: int, last: int) -> "Pieces":
        return self.map(lambda piece: piece.flatten(first, last))


class KeyValueCache:
    """Keys and values of all previous tokens, so that generation computes each token only once."""

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device):
        shape = (2, config.n_layers, batch_size, config.kv_heads, config.context_length, config.head_width)
        self.memory = torch.empty(shape, device=device)  # (2, L, B, K, T, D)
        self.length = 0  # number of tokens with keys and values; `finish` increases it after the last block

    def positions(self, tokens: Int[Tensor, "B T"]) -> Int[Tensor, "T"]:
        return torch.arange(self.length, self.length + tokens.shape[1], device=tokens.device)

    def attend(
        self, layer: int, queries: Float[Tensor, "B H T D"], keys: Float[Tensor, "B K T D"], values: Tensor
    ) -> Float[Tensor, "B H T D"]:
        """Append a layer's new keys and values, and return the attention of the new queries to all tokens."""
        end = self.length + keys.shape[2]
        self.memory[0, layer, :, :, self.length : end] = keys
        self.memory[1, layer, :, :, self.length : end] = values
        keys, values = self.memory[0, layer, :, :, :end], self.memory[1, layer, :, :, :end]
        return attend(queries, keys, values, past_length=self.length)

    def finish(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B 1 C"]:
        """Add the new tokens to `length`, and return the last position of `x`.

        Only the token after the last position is unknown, so only its logits are needed.
        """
        self.length += x.shape[1]
        return x[:, -1:]


class CacheGroup:
    """The caches of T texts, each with batch size 1. Each text gets one new token; these T tokens form a single row."""

    def __init__(self, caches: list[KeyValueCache]):
        self.caches = caches

    def positions(self, tokens: Int[Tensor, "1 T"]) -> Int[Tensor, "T"]:
        return torch.tensor([cache.length for cache in self.caches], device=tokens.device)

    def attend(
        self, layer: int, queries: Float[Tensor, "1 H T D"], keys: Float[Tensor, "1 K T D"], values: Tensor
    ) -> Float[Tensor, "1 H T D"]:
        """Append a new key and value to each text, and return the attention of each query to its own text."""
        texts = zip(self.caches, *(part.split(1, dim=2) for part in (queries, keys, values)), strict=True)
        return torch.cat([cache.attend(layer, *parts) for cache, *parts in texts], dim=2)

    def finish(self, x: Float[Tensor, "1 T C"]) -> Float[Tensor, "1 T C"]:
        """Increase the length of each text by one, because it has a new token. Return `x` unchanged."""
        for cache in self.caches:
            cache.length += 1
        return x


class ScoringCache:
    """The cache of one text that is scored: logits are computed after every new token, not only after the last one."""

    def __init__(self, cache: KeyValueCache):
        self.positions, self.attend, self.finish_last = cache.positions, cache.attend, cache.finish

    def finish(self, x: Float[Tensor, "1 T C"]) -> Float[Tensor, "1 T C"]:
        """Add the new tokens to the length of the text, and return `x` unchanged."""
        self.finish_last(x)
        return x


Cache = KeyValueCache | CacheGroup | ScoringCache
Stream = Float[Tensor, "B _ C"] | Pieces  # the residual stream, (B, T, C)


class Attention(nn.Module):
    """Causal multi-head self-attention with one matmul for queries, keys and values."""

    inverse_layer: Tensor | None

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.heads = config.qkv_heads
        self.drop_rate = config.drop_rate
        self.qkv = nn.Linear(config.emb_dim, config.qkv_width, bias=config.qkv_bias)
        self.query_norm = HeadNorm(config) if config.qk_norm else nn.Identity()
        self.key_norm = HeadNorm(config) if config.qk_norm else nn.Identity()
        # A Python number would be a constant of the compiled block, so torch would compile a separate graph for every
        # layer.
        inverse_layer = torch.tensor(1 / (layer + 1), device="cpu") if config.scale_attention_by_inverse_layer else None
        self.register_buffer("inverse_layer", inverse_layer, persistent=False)
        self.output = nn.Linear(config.emb_dim, config.emb_dim, bias=config.biases)

    def forward(
        self, x: Float[Tensor, "B T C"], rotation: Rotation = None, cache: Cache | None = None
    ) -> Float[Tensor, "B T C"]:
        queries, keys, values = self.split(self.qkv(x), rotation)
        if cache is None:
            mixed = attend(queries, keys, values, drop_rate=self.drop_rate if self.training else 0.0)
        else:
            mixed = cache.attend(self.layer, queries, keys, values)
        return self.output(mixed.transpose(1, 2).flatten(2))  # mixed: (B, H, T, D)

    def split(self, fused: Float[Tensor, "B T _"], rotation: Rotation) -> list[Float[Tensor, "B _ T D"]]:
        """Return queries (B, H, T, D), keys and values (B, K, T, D), normalized and rotated as configured."""
        width = fused.shape[-1] // sum(self.heads)
        parts = fused.split([count * width for count in self.heads], dim=-1)
        queries, keys, values = [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts]  # views, no copies
        queries, keys = self.query_norm(queries), self.key_norm(keys)
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        if self.inverse_layer is not None:
            queries = queries * self.inverse_layer
        return [queries, keys, values]


class MLP(nn.Module):
    """Feed-forward layer: linear, activation, linear. With a gate, `up(x)` is multiplied by the activated gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.emb_dim, config.hidden_width, bias=config.biases)
        self.down = nn.Linear(config.hidden_width, config.emb_dim, bias=config.biases)
        gated = config.activation in GATED
        self.gate = nn.Linear(config.emb_dim, config.hidden_width, bias=config.biases) if gated else None
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class HeadNorm(nn.RMSNorm):
    """RMSNorm of the queries or keys of each head, computed in fp32 and returned in the input's precision."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.head_width, config.norm_eps, config.norm_gain)

    def forward(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
        return super().forward(x.float()).type_as(x)


class Block(nn.Module):
    """Transformer block: attention, then MLP.

    A norm precedes each of these two parts, and the output of each part is added to the residual stream.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = norm(config)
        self.attention = Attention(config, layer)
        self.attention_dropout = nn.Dropout(config.drop_rate)
        self.mlp_norm = norm(config)
        self.mlp = MLP(config)
        self.mlp_dropout = nn.Dropout(config.drop_rate)

    def forward(self, x: Stream, rotation: Rotation = None, cache: Cache | None = None) -> Stream:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rotation, cache))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """The network: token embedding and positions, blocks, final norm, output head.

    The rows of the embedding after the first `vocab_size` rows are padding, and stay zero.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.head_options = HeadOptions(config.vocab_size, config.logit_softcap)
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.emb_dim)
        self.embedding_norm = norm(config) if config.embedding_norm else nn.Identity()
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim) if learned else None
        self.dropout = nn.Dropout(config.drop_rate)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = norm(config)
        self.head = None if config.tie_weights else nn.Linear(config.emb_dim, config.padded_vocab_size, bias=False)

    def forward(self, tokens: Int[Tensor, "B T"], cache: Cache | None = None) -> Float[Tensor, "B _ V"]:
        """Return the logits of the next token after each of `tokens`, (B, T, V).

        With a cache, `tokens` follow the tokens in the cache, and only the logits after the last token are computed,
        (B, 1, V).
        """
        hidden: Any = self.hidden(tokens, cache)
        return output_logits(hidden, self.output_weight(), self.head_options)

    def hidden(
        self, tokens: Int[Tensor, "B T"], cache: Cache | None = None, recompute: Recompute | None = None
    ) -> Stream:
        """Return the input of the output head, (B, T, C). With a cache, return it only for the last token, (B, 1, C).

        If `recompute` is given, it is called to run each block with activation checkpointing.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) if cache is None else cache.positions(tokens)
        x, rotation = self.embedding_norm(self.token_embedding(tokens)), None
        if self.position_embedding is None:
            rotation = rotation_at(positions, self.config)
        else:
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation, cache) if recompute is None else recompute(block, x, rotation)
        if cache is not None:
            x = cache.finish(x)
        return self.final_norm(x)

    def output_weight(self) -> Float[Tensor, "_ C"]:
        """Return the output head's weight, (padded V, C). If weights are tied, this is the token embedding."""
        return self.token_embedding.weight if self.head is None else self.head.weight


def output_logits(
    hidden: Float[Tensor, "*B C"], weight: Float[Tensor, "_ C"], options: HeadOptions
) -> Float[Tensor, "*B V"]:
    """Return the output head's logits, (..., V). With a softcap, they are in fp32."""
    logits = F.linear(hidden, weight)[..., : options.vocabulary_size]
    return logits if options.softcap is None else options.softcap * torch.tanh(logits.float() / options.softcap)


def norm(config: ModelConfig) -> nn.Module:
    """Return a norm over C, as configured."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.emb_dim, config.norm_eps, config.norm_gain)
    return nn.LayerNorm(config.emb_dim, config.norm_eps, config.norm_gain, config.biases)


def attend(
    queries: Float[Tensor, "B H T D"],
    keys: Float[Tensor, "B K S D"],
    values: Tensor,
    drop_rate: float = 0.0,
    past_length: int = 0,
) -> Float[Tensor, "B H T D"]:
    """Return causal attention. `past_length` is the number of tokens before the first query."""
    keys, values = repeat_heads(keys, queries.shape[1]), repeat_heads(values, queries.shape[1])
    if not past_length:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=drop_rate)
    # A single new query sees all keys and needs no mask. For several queries, is_causal would be wrong: it would let
    # the first query see only the first key.
    mask = None
    if queries.shape[2] > 1:
        mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=queries.device).tril(past_length)
    return F.scaled_dot_product_attention(queries, keys, values, mask)


def repeat_heads(x: Float[Tensor, "B K S D"], heads: int) -> Float[Tensor, "B H S D"]:
    """Return keys or values for H query heads, (B, H, S, D).

    The heads are copied, because few fused kernels support groups of query heads.
    """
    times = heads // x.shape[1]
    return x if times == 1 else x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def rotation_at(positions: Int[Tensor, "T"], config: ModelConfig) -> Float[Tensor, "2 T _"]:
    """Return the rotation at the given positions, in fp32: one angle for each pair of a head's elements."""
    pairs = torch.arange(0, config.head_width, 2, device=positions.device).float() / config.head_width  # (D / 2,)
    angles = torch.outer(positions.float(), 1.0 / config.rope_base**pairs)  # (T, D / 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Float[Tensor, "B H T D"], rotation: Float[Tensor, "2 T _"]) -> Float[Tensor, "B H T D"]:
    """Return queries or keys rotated by the positive angle. Elements i and i + D / 2 form a pair, as in Llama.

    The computation is in fp32, and its result is returned in the input's precision.
    """
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).type_as(x)


def initialize(model: GPT, seed: int) -> None:
    """Set the weights of a network to their initial values. The network must be on one device and not sharded."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in initial_weights(model, seed):
            parameters[name].copy_(values)


def initial_weights(model: GPT, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the complete initial value of each parameter, one at a time, on the CPU.

    Weights are initialized as in GPT-2: matrices have normally distributed entries, residual projections are scaled by
    1/sqrt(2 L), and biases are zero. `zero_init_projections` and `zero_init_head` set residual projections and the head
    to zero.

    Only the shapes of the model's parameters are used. A separate generator draws the values in the order of the
    parameters, so they are the same on every machine and rank.
    """
    generator, config = torch.Generator().manual_seed(seed), model.config
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, device="cpu")
        if values.dim() > 1:
            nn.init.normal_(values, std=_initial_std(name, config), generator=generator)
        else:
            values.fill_(0.0 if name.endswith("bias") else 1.0)  # a vector that is not a bias is a norm's gain
        values[len(unpadded(name, values, config)) :] = 0.0
        yield name, values


def _initial_std(name: str, config: ModelConfig) -> float:
    axes = axes_of(name, config)
    if axes.row_names == ["embed"]:  # this layer's output is added to the residual stream
        return 0.0 if config.zero_init_projections else INITIAL_STD / math.sqrt(2 * config.n_layers)
    if axes.row_names == ["vocab"] and not axes.embedding and config.zero_init_head:
        return 0.0
    return INITIAL_POSITION_STD if axes.row_names == ["position"] else INITIAL_STD


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
}
