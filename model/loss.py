"""Training loss: the cross-entropy of the next token, in nats per token and always in fp32.

B micro-batch, T tokens, N tokens of a chunk, C width, V vocabulary, R rows of the output weight (V or more).
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
    """The network and its loss as one module. DDP or FSDP wraps this module, and a training step calls it.

    `recompute_blocks` turns on activation checkpointing: in training, only the input of each block is kept. If `chunks`
    is above 1, logits are computed for one chunk of the tokens at a time, and recomputed in the backward pass.
    """

    def __init__(self, network: Any, *, recompute_blocks: bool = False, chunks: int = 1):
        super().__init__()
        self.network: GPT = network  # or a ShardedGPT, which has the same interface
        keep_rng = network.config.drop_rate > 0
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=keep_rng)
        self.recompute_blocks = recompute_blocks
        self._recompute = recompute if recompute_blocks else None
        self.chunks = chunks
        self._head_loss: Callable[..., Tensor] = head_loss
        self._sequence_losses = sequence_losses

    def compile_head(self, **options: Any) -> None:
        """Compile the output head and the loss as one graph. Like nn.Module.compile, this changes the object in place.

        The compiled graph never stores fp32 logits, and stores the gradient of the logits once. Without compilation,
        there would be two copies of this gradient, one with and one without the vocabulary's padding.
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
        """Return the mean loss over B * T targets. The loss of each target is multiplied by the target's weight.

        With `by_sequence`, return the mean loss of each sequence, (B,); this is not meant for training.
        """
        hidden: Any = self.network.hidden(tokens, recompute=self._recompute if self.training else None)  # (B, T, C)
        if by_sequence:
            return self._loss_by_sequence(hidden, targets, token_weights)
        factors = None if token_weights is None else token_weights.flatten()
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.chunks > 1:
            return self._loss_in_chunks(hidden, targets, factors)
        if factors is None:
            return self._loss(hidden, targets, "mean")
        return (self._loss(hidden, targets, "none") * factors).mean()

    def _loss(self, hidden: Float[Tensor, "N C"], targets: Int[Tensor, "N"], reduction: str) -> Float[Tensor, "*N"]:
        network = self.network
        return self._head_loss(hidden, network.output_weight(), targets, network.head_options, reduction)

    def _loss_in_chunks(
        self, hidden: Float[Tensor, "N C"], targets: Int[Tensor, "N"], factors: Float[Tensor, "N"] | None
    ) -> Float[Tensor, ""]:
        """Return the mean loss. Only one chunk's logits are in memory at a time; the backward pass recomputes them."""
        total, chunks = torch.zeros((), device=hidden.device), hidden.chunk(self.chunks)
        chunks_of_factors = [None] * len(chunks) if factors is None else factors.chunk(self.chunks)
        for part, ids, weights in zip(chunks, targets.chunk(self.chunks), chunks_of_factors, strict=True):
            arguments = (part, ids, "sum" if weights is None else "none")
            loss = checkpoint(self._loss, *arguments, use_reentrant=False, preserve_rng_state=False)
            total = total + (loss if weights is None else (loss * weights).sum())
        return total / targets.numel()

    def _loss_by_sequence(
        self, hidden: Float[Tensor, "B T C"], targets: Int[Tensor, "B T"], factors: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B"]:
        """Return the mean loss of each sequence. The logits of only one chunk of sequences are in memory at a time."""
        weight, options = self.network.output_weight(), self.network.head_options
        rows = [None] * targets.shape[0] if factors is None else factors.chunk(self.chunks)
        parts = zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), rows, strict=False)
        return torch.cat([self._sequence_losses(part, weight, ids, options, row) for part, ids, row in parts])


def head_loss(
    hidden: Float[Tensor, "N C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "N"],
    options: HeadOptions,
    reduction: str,
) -> Float[Tensor, "*N"]:
    """Return the cross-entropy, computed from the input of the output head.

    `reduction` has the same meaning as in torch.nn.functional.cross_entropy.
    """
    return token_losses(output_logits(hidden, weight, options), targets, reduction)


def sequence_losses(
    hidden: Float[Tensor, "B T C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "B T"],
    options: HeadOptions,
    factors: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B"]:
    """Return the mean loss of each sequence. The loss of each target is multiplied by its factor."""
    losses = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), options, "none").view(targets.shape)
    return (losses if factors is None else losses * factors).mean(dim=1)


def token_losses(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"], reduction: str = "none"
) -> Float[Tensor, "*N"]:
    """Return the loss of each target, or the mean or sum of these losses, from one row of logits per target.

    Losses are in nats and in fp32. Training and every measurement of a model's loss use this function. `reduction` has
    the same meaning as in torch's cross_entropy.
    """
    return F.cross_entropy(logits.float(), targets, reduction=reduction)


def check_finite(values: Tensor, subject: str) -> None:
    """Raise ValueError if a loss or logit is not finite. The message begins with `subject`, such as "the loss is"."""
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{subject} not finite: the weights are damaged, or training diverged")
