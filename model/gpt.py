"""GPT-2 network: token ids in, next-token logits out.

Pre-norm blocks, learned positions, GELU, fused QKV: Radford et al. 2019 and OpenAI's released code.
B micro-batch, T tokens, C embedding width, H heads, D head width (C = H * D), V vocabulary, S tokens seen so far.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.config import ACTIVATIONS, INITIAL_STD, ModelConfig

Recompute = Callable[[nn.Module, Tensor], Tensor]  # a block and its input -> its output

INITIAL_POSITION_STD = 0.01  # position embedding, as in OpenAI's model.py


class KeyValueCache:
    """Keys and values of the tokens seen so far: generation computes each token once."""

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device):
        head_width = config.emb_dim // config.n_heads
        shape = (2, config.n_layers, batch_size, config.n_heads, config.context_length, head_width)
        self.memory = torch.empty(shape, device=device)  # (2, L, B, H, T, D)
        self.length = 0  # tokens seen; advanced by GPT.hidden after the last block

    def extend(
        self, layer: int, keys: Float[Tensor, "B H T D"], values: Float[Tensor, "B H T D"]
    ) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S D"]]:
        """Append a layer's new keys and values; return all of them, (B, H, S, D) each."""
        end = self.length + keys.shape[2]
        self.memory[0, layer, :, :, self.length : end] = keys
        self.memory[1, layer, :, :, self.length : end] = values
        return self.memory[0, layer, :, :, :end], self.memory[1, layer, :, :, :end]


class Attention(nn.Module):
    """Causal multi-head self-attention with one matmul for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.heads = config.n_heads
        self.drop_rate = config.drop_rate
        self.qkv = nn.Linear(config.emb_dim, 3 * config.emb_dim, bias=config.qkv_bias)
        self.output = nn.Linear(config.emb_dim, config.emb_dim)

    def forward(self, x: Float[Tensor, "B T C"], cache: KeyValueCache | None = None) -> Float[Tensor, "B T C"]:
        queries, keys, values = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        causal = True
        if cache is not None:
            causal = cache.length == 0
            assert causal or x.shape[1] == 1  # without a mask only a single new token attends correctly
            keys, values = cache.extend(self.layer, keys, values)
        drop_rate = self.drop_rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, dropout_p=drop_rate)
        return self.output(mixed.transpose(1, 2).flatten(2))  # mixed: (B, H, T, D)


class MLP(nn.Module):
    """Feed-forward layer: linear, GELU, linear, with a hidden width of 4 C."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.down = nn.Linear(4 * config.emb_dim, config.emb_dim)
        self.approximation = ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        return self.down(F.gelu(self.up(x), approximate=self.approximation))


class Block(nn.Module):
    """Transformer block: attention, then MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.emb_dim)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.emb_dim)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.drop_rate)

    def forward(self, x: Float[Tensor, "B T C"], cache: KeyValueCache | None = None) -> Float[Tensor, "B T C"]:
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Token and position embedding, blocks, final norm, output head. Embedding rows from `vocab_size` on stay zero."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.emb_dim)
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = nn.Dropout(config.drop_rate)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim)
        self.head = None if config.tie_weights else nn.Linear(config.emb_dim, config.padded_vocab_size, bias=False)

    def forward(self, tokens: Int[Tensor, "B T"], cache: KeyValueCache | None = None) -> Float[Tensor, "B _ V"]:
        """Return logits of the token after each of `tokens`, (B, T, V).

        With a cache, `tokens` follow those it has seen, and only the last one's logits are computed, (B, 1, V).
        """
        logits = F.linear(self.hidden(tokens, cache), self.output_weight())  # (B, T, padded V)
        return logits[..., : self.config.vocab_size]

    def hidden(
        self, tokens: Int[Tensor, "B T"], cache: KeyValueCache | None = None, recompute: Recompute | None = None
    ) -> Float[Tensor, "B _ C"]:
        """Return the input of the output head, (B, T, C); with a cache of the last token alone.

        `recompute` runs a block without keeping its activations.
        """
        first = 0 if cache is None else cache.length
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x, cache) if recompute is None else recompute(block, x)
        if cache is not None:
            cache.length += tokens.shape[1]
            x = x[:, -1:]  # the others have their next token already
        return self.final_norm(x)

    def output_weight(self) -> Float[Tensor, "_ C"]:
        """Return the output head's weight (padded V, C): its own, or the token embedding where they are tied."""
        return self.token_embedding.weight if self.head is None else self.head.weight


def split_heads(x: Float[Tensor, "B T C"], heads: int) -> Float[Tensor, "B H T D"]:
    """Return x (B, T, C) seen as heads: (B, H, T, D). A view, no copy."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def initialize(model: GPT, seed: int) -> None:
    """Initialize the weights as GPT-2 does: normal, residual projections scaled by 1/sqrt(2 L), biases zero.

    Draws on the CPU from a generator of its own: the initial weights are the same on every machine and rank.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INITIAL_STD / math.sqrt(2 * model.config.n_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = residual_std if name.endswith(("attention.output", "mlp.down")) else INITIAL_STD
            nn.init.normal_(module.weight, std=std, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            std = INITIAL_POSITION_STD if name == "position_embedding" else INITIAL_STD
            nn.init.normal_(module.weight, std=std, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_padded(name):
                parameter[model.config.vocab_size :] = 0.0


def is_padded(name: str) -> bool:
    """Tell whether the parameter of that name has rows beyond the vocabulary."""
    return name in ("token_embedding.weight", "head.weight")
