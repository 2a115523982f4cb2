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
        self._part = _head_loss

    def compile(self) -> None:
        """Compile the function, for one shape at a time."""
        self._part = torch.compile(_head_loss, fullgraph=True, dynamic=False)

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


def sequence_losses(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B"]:
    """Return the mean cross-entropy of each sequence, in fp32."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def _head_loss(
    hidden: Float[Tensor, "N C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "N"],
    vocabulary_size: int,
    reduction: str,
) -> Float[Tensor, ""]:
    logits = F.linear(hidden, weight)[:, :vocabulary_size]
    return F.cross_entropy(logits.float(), targets, reduction=reduction)
