"""The training objective: cross-entropy of the next token, in nats per token."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def next_token_loss(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over all B * T targets, in fp32 whatever the logits' type."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def sequence_losses(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B"]:
    """Return the mean cross-entropy of each sequence, in fp32."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)
