"""The training objective: cross-entropy of the next token, in nats per token.

B micro-batch, T tokens, N tokens of a chunk, C width, V vocabulary, R rows of the head, V or more.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class HeadLoss:
    """From what enters the head to the mean loss, in nats per token, fp32 whatever the precision.

    The head's matrix product and the loss are one function: compiled, it never has logits in fp32 in memory, nor their
    gradient twice, with and without the rows beyond the vocabulary.

    `chunks`: more than 1 have the logits of one chunk of the tokens at a time, and compute them again in the backward
    pass.
    """

    def __init__(self, vocabulary_size: int, chunks: int):
        self.chunks = chunks
        self._vocabulary_size = vocabulary_size
        self._part, self._sequences = _head_loss, _sequence_losses

    def compile(self) -> None:
        """Compile the functions, for one shape at a time."""
        self._part = torch.compile(_head_loss, fullgraph=True, dynamic=False)
        self._sequences = torch.compile(_sequence_losses, fullgraph=True, dynamic=False)

    def __call__(
        self, hidden: Float[Tensor, "B T C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "B T"]
    ) -> Float[Tensor, ""]:
        """Return the mean over all B * T targets; the weight's first V rows count."""
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.chunks == 1:
            return self._part(hidden, weight, targets, self._vocabulary_size, "mean")
        total = torch.zeros((), device=hidden.device)
        for part, wanted in zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), strict=True):
            arguments = (part, weight, wanted, self._vocabulary_size, "sum")
            total = total + checkpoint(self._part, *arguments, use_reentrant=False, preserve_rng_state=False)
        return total / targets.numel()

    def by_sequence(
        self, hidden: Float[Tensor, "B T C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B"]:
        """Return the mean of each sequence, without a backward pass in mind."""
        parts = zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), strict=True)
        return torch.cat([self._sequences(part, weight, wanted, self._vocabulary_size) for part, wanted in parts])


def _head_loss(
    hidden: Float[Tensor, "N C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "N"],
    vocabulary_size: int,
    reduction: str,
) -> Float[Tensor, "*N"]:
    logits = F.linear(hidden, weight)[:, :vocabulary_size]
    return F.cross_entropy(logits.float(), targets, reduction=reduction)


def _sequence_losses(
    hidden: Float[Tensor, "B T C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "B T"], vocabulary_size: int
) -> Float[Tensor, "B"]:
    losses = _head_loss(hidden.flatten(0, 1), weight, targets.flatten(), vocabulary_size, "none")
    return losses.view(targets.shape).mean(dim=1)
