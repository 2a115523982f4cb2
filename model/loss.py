"""The training objective: cross-entropy of the next token, in nats per token.

B micro-batch, T tokens, N tokens of a chunk, C width, V vocabulary, R rows of the head, V or more.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def next_token_loss(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over all B * T targets, in fp32 whatever the logits' type."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def chunked_loss(
    hidden: Float[Tensor, "B T C"],
    weight: Float[Tensor, "R C"],
    targets: Int[Tensor, "B T"],
    vocabulary_size: int,
    chunks: int,
) -> Float[Tensor, ""]:
    """Return the mean loss of the head's logits, in fp32, with the logits of one chunk of the tokens at a time.

    The first `vocabulary_size` rows of the weight count. The backward pass computes each chunk's logits once more.
    """
    total = torch.zeros((), device=hidden.device)
    for part, wanted in zip(hidden.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True):
        total = total + checkpoint(
            _sum_of_losses, part, weight, wanted, vocabulary_size, use_reentrant=False, preserve_rng_state=False
        )
    return total / targets.numel()


def sequence_losses(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B"]:
    """Return the mean cross-entropy of each sequence, in fp32."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def _sum_of_losses(
    hidden: Float[Tensor, "N C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "N"], vocabulary_size: int
) -> Float[Tensor, ""]:
    logits = F.linear(hidden, weight)[:, :vocabulary_size]
    return F.cross_entropy(logits.float(), targets, reduction="sum")
