"""Losses of continuations behind their contexts."""

from collections.abc import Sequence
from itertools import chain

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from common.errors import BadInput
from evaluation.loss.held_out_loss import BATCH_TOKENS
from evaluation.shared.load import Trained
from model.gpt import output_logits


@attrs.frozen
class Choice:
    tokens: np.ndarray  # of context and continuation, 1-D
    scored: int  # number of them, at the end, whose loss counts

    def within(self, most: int) -> "Choice":
        """Return the choice cut to its last `most` tokens, of which the first has no loss."""
        return Choice(self.tokens[-most:], min(self.scored, most - 1))


@torch.inference_mode()
def choice_losses(trained: Trained, items: Sequence[Sequence[Choice]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return of each item's choices, for their scored tokens: the loss, nats, fp64, and whether no token is likelier.

    Logits are computed for these tokens alone. Raises BadInput for a loss that is not finite.
    """
    network, choices, found = trained.network, [*chain(*items)], dict[int, tuple[np.ndarray, np.ndarray]]()
    order = sorted(range(len(choices)), key=lambda number: -len(choices[number].tokens))
    batches = -(-len(choices) * len(choices[order[0]].tokens) // BATCH_TOKENS)
    for batch in np.array_split(order, min(batches, len(order))):
        rows = [torch.from_numpy(choices[number].tokens.astype(np.int64)) for number in batch]
        counts = [choices[number].scored for number in batch]
        tokens = pad_sequence(rows, batch_first=True).to(next(network.parameters()).device)  # padding has no effect
        places = [(row, len(rows[row]) - count, len(rows[row])) for row, count in enumerate(counts)]
        targets = torch.cat([tokens[row, begin:end] for row, begin, end in places])  # (N,)
        hidden = network.hidden(tokens[:, :-1])  # (B, T, C)
        hidden = torch.cat([hidden[row, begin - 1 : end - 1] for row, begin, end in places])  # (N, C)
        logits = output_logits(hidden, network.output_weight(), network.head_options).float()  # (N, V)
        nats = F.cross_entropy(logits, targets, reduction="none").double().cpu()
        if not nats.isfinite().all():
            problem = "its loss is not finite: the weights are damaged, or training diverged"
            raise BadInput(f"{trained.place.path}: {problem}")
        parts = zip(nats.split(counts), (logits.argmax(-1) == targets).cpu().split(counts), strict=True)
        found |= {
            int(number): (losses.numpy(), best.numpy()) for number, (losses, best) in zip(batch, parts, strict=True)
        }
    numbers = iter(range(len(choices)))
    return [[found[next(numbers)] for _ in item] for item in items]
