"""Training loss: cross-entropy of the next token, in nats per token, fp32 whatever the precision.

B micro-batch, T tokens, N tokens of a chunk, C width, V vocabulary, R rows of the output weight, V or more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT, HeadOptions, output_logits


class NextTokenLoss(nn.Module):
    """Network and loss as one module: DDP or FSDP wraps it, a training step calls it.

    `recompute_blocks`: activation checkpointing, block by block: in training only the input of each block is kept.
    `chunks`: above 1, logits of one chunk of the tokens at a time, recomputed in the backward pass.
    """

    def __init__(self, network: Any, *, recompute_blocks: bool = False, chunks: int = 1):
        super().__init__()
        self.network: GPT = network  # or one with its interface, in tensor shards
        keep_rng = network.config.drop_rate > 0
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=keep_rng)
        self.recompute_blocks = recompute_blocks
        self._recompute = recompute if recompute_blocks else None
        self.chunks = chunks
        self._head_loss: Callable[..., Tensor] = head_loss
        self._sequence_losses = sequence_losses

    def compile_head(self, **options: Any) -> None:
        """Compile output head and loss as one graph, in place, as nn.Module.compile does with a module.

        The graph never has fp32 logits in memory, nor their gradient twice, with and without the vocabulary's padding.
        """
        self._head_loss = torch.compile(self._head_loss, **options)
        self._sequence_losses = torch.compile(self._sequence_losses, **options)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        token_weights: Float[Tensor, "B T"] | None = None,
        *,
        by_sequence: bool = False,
    ) -> Float[Tensor, "*B"]:
        """Return the mean loss over B * T targets, each times its weight; or by sequence, (B,), not for training."""
        hidden = self.network.hidden(tokens, recompute=self._recompute if self.training else None)  # (B, T, C)
        weight, options = self.network.output_weight(), self.network.head_options
        if by_sequence:
            rows = [None] * targets.shape[0] if token_weights is None else token_weights.chunk(self.chunks)
            parts = zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), rows, strict=False)
            return torch.cat([self._sequence_losses(part, weight, wanted, options, own) for part, wanted, own in parts])
        factors = None if token_weights is None else token_weights.flatten()
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.chunks == 1:
            if factors is None:
                return self._head_loss(hidden, weight, targets, options, "mean")
            return (self._head_loss(hidden, weight, targets, options, "none") * factors).mean()
        total, chunks = torch.zeros((), device=hidden.device), hidden.chunk(self.chunks)
        chunks_of_factors = [None] * len(chunks) if factors is None else factors.chunk(self.chunks)
        for part, wanted, own in zip(chunks, targets.chunk(self.chunks), chunks_of_factors, strict=True):
            arguments = (part, weight, wanted, options, "sum" if own is None else "none")
            loss = checkpoint(self._head_loss, *arguments, use_reentrant=False, preserve_rng_state=False)
            total = total + (loss if own is None else (loss * own).sum())
        return total / targets.numel()


def head_loss(
    hidden: Float[Tensor, "N C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "N"],
    options: HeadOptions,
    reduction: str,
) -> Float[Tensor, "*N"]:
    """Return the cross-entropy from the output head's input; `reduction` as torch.nn.functional.cross_entropy's."""
    logits = output_logits(hidden, weight, options)
    return F.cross_entropy(logits.float(), targets, reduction=reduction)


def sequence_losses(
    hidden: Float[Tensor, "B T C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "B T"],
    options: HeadOptions,
    factors: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B"]:
    """Return the mean loss of each sequence, that of each target times its factor."""
    losses = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), options, "none").view(targets.shape)
    return (losses if factors is None else losses * factors).mean(dim=1)
