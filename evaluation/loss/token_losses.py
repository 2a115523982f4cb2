"""Compute the losses of single tokens, and refuse losses that are not finite."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import refusing
from evaluation.loss.token_range import Range
from evaluation.shared.load import Trained
from evaluation.shared.measuring import share
from model.gpt import GPT
from model.loss import check_finite, token_losses
from tokens.format.token_file import TokenStream
from training.parallel.process_group import Ranks

BATCH_TOKENS = 1 << 12  # tokens in a forward pass; with GPT-2's vocabulary, their logits take 0.8 GB


@torch.inference_mode()
def prediction_losses(network: GPT, tokens: Tensor) -> Tensor:
    """Return the loss of every token except the first one of each row, in nats, fp32 (B, T).

    `tokens`: int64 (B, T + 1).
    """
    tokens = tokens.to(next(network.parameters()).device)
    logits = network(tokens[:, :-1])  # (B, T, V)
    return token_losses(logits.flatten(0, 1), tokens[:, 1:].flatten()).view(len(tokens), -1)


def range_losses(trained: Trained, stream: TokenStream, span: Range, ranks: Ranks) -> np.ndarray:
    """Return, on every rank, the loss of each predicted token of a range, in nats, fp32 (count,)."""
    network, length = trained.network, trained.network.config.context_length
    length = min(length, stream.context_length or length)  # a window must not span two rows of conversations
    starts = range(span.start, span.start + span.count, length)
    full_windows = span.count // length  # one shorter window may follow
    size = max(1, BATCH_TOKENS // length)
    batches = [starts[at : min(at + size, full_windows)] for at in range(0, full_windows, size)]
    batches += [starts[full_windows:]] if full_windows < len(starts) else []

    def losses(batch: range) -> np.ndarray:
        ends = [min(start + length, span.start + span.count) for start in batch]
        tokens = np.stack([stream.read(start, end - start + 1) for start, end in zip(batch, ends, strict=True)])
        return prediction_losses(network, torch.from_numpy(tokens.astype(np.int64))).flatten().cpu().numpy()

    return np.concatenate(share(ranks, batches, losses))


def check_losses(trained: Trained, losses: Tensor) -> None:
    """Raise BadInput if any loss is not finite. In that case, no mean is computed, and nothing is stored."""
    with refusing(trained.location.path):
        check_finite(losses, "its loss is")


def log_probabilities(losses: Sequence[float] | np.ndarray) -> list[float | None]:
    """Return the log-probability of each token in nats, for a page. An entry is None if its loss is not finite."""
    return [-float(loss) if math.isfinite(loss) else None for loss in losses]
