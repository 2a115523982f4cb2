"""Tensor parallelism: a network in shards, each with a part of the heads, MLP columns and vocabulary.

Each shard computes attention and MLP with its part of the weights, on all tokens; all else, between them, on a piece of
the sequence (Korthikanti et al., arXiv 2205.05198). Sums over shards are added one after the other, in fp32, so that
the bits depend on the number of shards alone, not on the processes that they lie on. A shard has a copy of its own of
each element that several hold; their gradients are parts of a sum (training/parallel/tensor_shards.py).
B micro-batch, T tokens, S shards, t = T / S, C width, P processes, L = S / P shards of each, N tokens of a chunk, V
vocabulary, R = V / S with its padding.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.axes import axes_of, shard_cut
from model.config import ModelConfig
from model.gpt import GPT, Block, HeadOptions, Rotation, output_logits, rotation_at
from model.loss import NextTokenLoss

PADDING_LOGIT = -1e30  # of rows beyond the vocabulary: no probability, and no NaN where a shard has no others
IGNORED = -100  # target that another shard has

Pieces = tuple[Tensor, ...]  # of each shard of this process, (B, t, C)


@attrs.frozen(kw_only=True)
class ShardExchange:
    """Shards of this process, and how it exchanges tensors with those that have the others."""

    shards: int
    own: range  # of this process, neighbors
    all_gather: Callable[[Tensor], Tensor] = lambda own: own  # (L, ...) -> (S, ...)
    all_to_all: Callable[[Tensor], Tensor] = lambda parts: parts  # (P, ...), one for each process -> one of each

    def sequence(self, pieces: Iterable[Tensor]) -> Float[Tensor, "B T C"]:
        """Return all pieces of the sequence as one tensor."""
        return self.all_gather(_stacked(list(pieces))).transpose(0, 1).flatten(1, 2)

    def summed(self, partials: Sequence[Float[Tensor, "B T C"]]) -> Pieces:
        """Return this process's pieces of the sum of all shards' tensors, in fp32."""
        parts = _stacked(partials).unflatten(2, (self.shards // len(self.own), len(self.own), -1))
        parts = parts.permute(2, 0, 3, 1, 4, 5).contiguous()  # (P, L, L, B, t, C): to each process, of each, for each
        return ordered_sum(self.all_to_all(parts).flatten(0, 1)).unbind()


def ordered_sum(parts: Float[Tensor, "S *N"]) -> Float[Tensor, "*N"]:
    """Return the sum over the first dimension, added one after the other, in fp32."""
    total = parts[0].float() + parts[1]
    for part in parts[2:]:
        total += part
    return total


class Gather(torch.autograd.Function):
    """Pieces of a sequence -> the sequence, once for each shard: gradients of shards are added in order."""

    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, *pieces: Tensor) -> Pieces:
        ctx.exchange, ctx.dtype, kind = exchange, pieces[0].dtype, pieces[0].device.type
        dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else ctx.dtype
        whole = exchange.sequence(piece.to(dtype) for piece in pieces)
        return tuple(whole.view_as(whole) for _ in pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *(piece.to(ctx.dtype) for piece in ctx.exchange.summed(gradients))


def gather(exchange: ShardExchange, pieces: Iterable[Tensor]) -> Pieces:
    gathered: Pieces = Gather.apply(exchange, *pieces)
    return gathered


class Sum(torch.autograd.Function):
    """A tensor of each shard -> pieces of their sum, in fp32."""

    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, *partials: Tensor) -> Pieces:
        ctx.exchange, ctx.dtype = exchange, partials[0].dtype
        return exchange.summed(partials)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        whole = ctx.exchange.sequence(gradient.to(ctx.dtype) for gradient in gradients)
        return None, *(whole for _ in gradients)


class JoinLosses(torch.autograd.Function):
    """Log-sums of exponentials of each shard's logits, and logits of targets, (L, 2, N) -> losses (N,)."""

    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, own: Float[Tensor, "L 2 N"]) -> Float[Tensor, "N"]:
        every = exchange.all_gather(own)  # (S, 2, N)
        log_sums, top = every[:, 0], every[:, 0].amax(0)
        log_sum = top + ordered_sum((log_sums - top).exp()).log()
        ctx.save_for_backward((own[:, 0] - log_sum).exp())
        return log_sum - ordered_sum(every[:, 1])

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "N"]) -> tuple[Any, ...]:
        [shares] = ctx.saved_tensors  # of the probability, (L, N)
        return None, torch.stack((shares * gradient, -gradient.expand_as(shares)), dim=1)


class PartialLinear(nn.Linear):
    """Linear layer of one shard's inputs: its bias is added to the sum over shards."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@attrs.frozen
class ShardDropout:
    """Dropout whose masks follow from a micro-batch's seed, a place in the network, and the shard alone."""

    rate: float  # 0.0: none, as in validation
    first_seed: int
    shards: int

    def seed(self, place: int, shard: int) -> None:
        if self.rate > 0:
            torch.manual_seed((self.first_seed + place * self.shards + shard) % (1 << 63))

    def __call__(self, x: Tensor, place: int, shard: int) -> Tensor:
        self.seed(place, shard)
        return F.dropout(x, self.rate, self.rate > 0)


class ShardedBlock(nn.Module):
    """Transformer block in shards."""

    def __init__(self, blocks: Iterable[Block], exchange: ShardExchange):
        super().__init__()
        self.shards: Any = nn.ModuleList(blocks)
        self._exchange = exchange

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile what shards compute between exchanges: each shard is the same graph on any process."""
        for block in self.shards:
            block.attention.compile(*args, **options)
            block.mlp.compile(*args, **options)

    def forward(self, pieces: Pieces, rotation: Rotation, dropout: ShardDropout, layer: int) -> Pieces:
        blocks, own, partials = self.shards, self._exchange.own, []
        whole = gather(self._exchange, (block.attention_norm(x) for block, x in zip(blocks, pieces, strict=True)))
        for block, shard, x in zip(blocks, own, whole, strict=True):
            dropout.seed(3 * layer + 1, shard)
            partials.append(block.attention(x, rotation))
        pieces = self._add(pieces, partials, [block.attention.output.bias for block in blocks], dropout, 3 * layer + 2)
        whole = gather(self._exchange, (block.mlp_norm(x) for block, x in zip(blocks, pieces, strict=True)))
        partials = [block.mlp(x) for block, x in zip(blocks, whole, strict=True)]
        return self._add(pieces, partials, [block.mlp.down.bias for block in blocks], dropout, 3 * layer + 3)

    def _add(
        self, pieces: Pieces, partials: list[Tensor], biases: list[Tensor | None], dropout: ShardDropout, place: int
    ) -> Pieces:
        """Return the residual stream with a layer's output, summed over shards, added."""
        totals = zip(Sum.apply(self._exchange, *partials), biases, strict=True)
        outputs = [total if bias is None else total + bias for total, bias in totals]
        added = zip(pieces, outputs, self._exchange.own, strict=True)
        return tuple(piece + dropout(output, place, shard) for piece, output, shard in added)


class ShardedGPT(nn.Module):
    """A process's shards of a network. Names of parameters: SHARDS, the shard's place, the plain name."""

    def __init__(self, config: ModelConfig, exchange: ShardExchange):
        super().__init__()
        self.config, self.exchange = config, exchange
        self.shards: Any = nn.ModuleList(_network_of(config, exchange.shards, shard) for shard in exchange.own)
        layers = zip(*(network.blocks for network in self.shards), strict=True)
        self.blocks = nn.ModuleList(ShardedBlock(blocks, exchange) for blocks in layers)

    def hidden(self, tokens: Int[Tensor, "B T"], recompute: Callable[..., Any] | None = None) -> Pieces:
        """Return the head's input, (B, T, C), once for each shard of this process."""
        config, exchange, networks = self.config, self.exchange, self.shards
        rate = config.drop_rate if self.training else 0.0
        dropout = ShardDropout(rate, torch.initial_seed() if rate else 0, exchange.shards)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = [_embed(network, tokens, shard) for shard, network in zip(exchange.own, networks, strict=True)]
        pieces: Any = []
        for shard, network, total in zip(exchange.own, networks, Sum.apply(exchange, *embedded), strict=True):
            x = network.embedding_norm(total)
            if network.position_embedding is not None:
                x = x + network.position_embedding(positions.chunk(exchange.shards)[shard])
            pieces.append(dropout(x, 0, shard))
        rotation = rotation_at(positions, config) if config.positions == "rope" else None
        for layer, block in enumerate(self.blocks):
            arguments = tuple(pieces), rotation, dropout, layer
            pieces = block(*arguments) if recompute is None else recompute(block, *arguments)
        return gather(exchange, (network.final_norm(x) for network, x in zip(networks, pieces, strict=True)))


class ShardedLoss(NextTokenLoss):
    """Network in shards, and loss, as one module; each process returns the loss of all shards."""

    def __init__(self, network: ShardedGPT, *, recompute_blocks: bool = False, chunks: int = 1):
        super().__init__(network, recompute_blocks=recompute_blocks, chunks=chunks)
        self._head_loss = shard_losses

    def forward(
        self, tokens: Tensor, targets: Tensor, token_weights: Tensor | None = None, *, by_sequence: bool = False
    ) -> Float[Tensor, "*B"]:
        """Return the loss of the same arguments as NextTokenLoss does."""
        whole = self.network.hidden(tokens, recompute=self._recompute if self.training else None)
        parts = zip(*(x.flatten(0, 1).chunk(self.chunks) for x in whole), strict=True)
        wanted = targets.flatten().chunk(self.chunks)
        run: Any = self._losses
        if self.chunks > 1 and self.training:
            run = partial(checkpoint, self._losses, use_reentrant=False, preserve_rng_state=False)
        losses = torch.cat([run(ids, *part) for part, ids in zip(parts, wanted, strict=True)]).view(targets.shape)
        losses = losses if token_weights is None else losses * token_weights
        return losses.mean(dim=1) if by_sequence else losses.mean()

    def _losses(self, targets: Int[Tensor, "N"], *hidden: Float[Tensor, "N C"]) -> Float[Tensor, "N"]:
        network: Any = self.network
        config, exchange, sums = network.config, network.exchange, []
        rows = config.padded_vocab_size // exchange.shards
        for shard, part, x in zip(exchange.own, network.shards, hidden, strict=True):
            options = HeadOptions(min(max(config.vocab_size - shard * rows, 0), rows), config.logit_softcap)
            sums.append(self._head_loss(x, part.output_weight(), targets - shard * rows, options))
        losses: Tensor = JoinLosses.apply(exchange, torch.stack(sums))
        return losses


def shard_losses(
    hidden: Float[Tensor, "N C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "N"], options: HeadOptions
) -> Float[Tensor, "2 N"]:
    """Return the log-sum of exponentials of a shard's logits, and the logit of each target that it has, else 0.

    Targets count from its first row; `options.vocabulary_size`: its rows that are not padding.
    """
    rows = len(weight)
    logits = output_logits(hidden, weight, options._replace(vocabulary_size=rows)).float()
    if options.vocabulary_size < rows:
        padding = torch.arange(rows, device=logits.device) >= options.vocabulary_size
        logits = logits.masked_fill(padding, PADDING_LOGIT)
    local = torch.where((targets >= 0) & (targets < rows), targets, IGNORED)
    return torch.stack((logits.logsumexp(1), -F.nll_loss(logits, local, reduction="none", ignore_index=IGNORED)))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _embed(network: GPT, tokens: Int[Tensor, "B T"], shard: int) -> Float[Tensor, "B T C"]:
    """Return the token embedding where this shard has it, else zeros."""
    rows = len(network.token_embedding.weight)
    local = tokens - shard * rows  # ids
    elsewhere = (local < 0) | (local >= rows)
    return network.token_embedding(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _network_of(config: ModelConfig, shards: int, shard: int) -> GPT:
    """Return a network with one shard's parameters, without memory."""
    with torch.device("meta"):
        network = GPT(config)
        blocks: Any = network.blocks
        for block in blocks:
            block.attention.heads = tuple(max(1, heads // shards) for heads in config.qkv_heads)
            for layer, name in ((block.attention, "output"), (block.mlp, "down")):
                linear = getattr(layer, name)
                setattr(layer, name, PartialLinear(linear.in_features, linear.out_features, linear.bias is not None))
        for name, _ in list(network.named_parameters()):
            path, _, kind = name.rpartition(".")
            value = torch.empty(shard_cut(axes_of(name, config), shards, shard).shape)
            setattr(network.get_submodule(path), kind, nn.Parameter(value))
    return network
