"""Training loss: cross-entropy of the next token, in nats per token, fp32 whatever the precision.

B micro-batch, T tokens, N tokens of a chunk, C width, V vocabulary, R rows of the output weight, V or more.
"""

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

    def __init__(self, network: GPT, *, recompute_blocks: bool = False, chunks: int = 1):
        super().__init__()
        self.network = network
        keep_rng = network.config.drop_rate > 0
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=keep_rng)
        self.recompute_blocks = recompute_blocks
        self._recompute = recompute if recompute_blocks else None
        self._chunks = chunks
        self._head_loss, self._sequence_losses = head_loss, sequence_losses

    def compile_head(self, **options: Any) -> None:
        """Compile output head and loss as one graph, in place, as nn.Module.compile does with a module.

        The graph never has fp32 logits in memory, nor their gradient twice, with and without the vocabulary's padding.
        """
        self._head_loss = torch.compile(head_loss, **options)
        self._sequence_losses = torch.compile(sequence_losses, **options)

    def forward(
        self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], *, by_sequence: bool = False
    ) -> Float[Tensor, "*B"]:
        """Return the mean loss over all B * T targets, a scalar; or of each sequence, (B,), not for training."""
        loss = self._by_sequence if by_sequence else self._mean
        hidden = self.network.hidden(tokens, recompute=self._recompute if self.training else None)  # (B, T, C)
        return loss(hidden, self.network.output_weight(), targets)

    def _mean(
        self, hidden: Float[Tensor, "B T C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "B T"]
    ) -> Float[Tensor, ""]:
        options = self.network.head_options
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self._chunks == 1:
            return self._head_loss(hidden, weight, targets, options, "mean")
        total = torch.zeros((), device=hidden.device)
        for part, wanted in zip(hidden.chunk(self._chunks), targets.chunk(self._chunks), strict=True):
            arguments = (part, weight, wanted, options, "sum")
            total = total + checkpoint(self._head_loss, *arguments, use_reentrant=False, preserve_rng_state=False)
        return total / targets.numel()

    def _by_sequence(
        self, hidden: Float[Tensor, "B T C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B"]:
        parts = zip(hidden.chunk(self._chunks), targets.chunk(self._chunks), strict=True)
        options = self.network.head_options
        return torch.cat([self._sequence_losses(part, weight, wanted, options) for part, wanted in parts])


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
    hidden: Float[Tensor, "B T C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "B T"], options: HeadOptions
) -> Float[Tensor, "B"]:
    """Return the mean loss of each sequence."""
    losses = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), options, "none")
    return losses.view(targets.shape).mean(dim=1)
