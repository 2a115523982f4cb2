"""Training loss of a network in tensor shards. Each shard has some rows of the output head's weight.

N tokens of a chunk, S shards, L of them in this process, C width, V vocabulary, R = V / S including padding.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.errors import BadInput
from model.gpt import HeadOptions, Pieces, output_logits
from model.loss import NextTokenLoss
from model.shards import ShardedGPT, ShardExchange, ordered_sum

# The logit of padding rows. It gives these rows probability 0, without causing NaN if a shard has only padding.
PADDING_LOGIT = -1e30
IGNORED = -100  # this id replaces a target whose row belongs to another shard
SHARDED_HEAD_OPTIONS = ("vocabulary_size", "softcap")  # the HeadOptions that shard_losses supports


class ShardedLoss(NextTokenLoss):
    """A network in tensor shards, with its loss, as one module. Every process returns the loss over all shards.

    A chunk is a part of the tokens. The token losses of all chunks are joined before the mean is computed.
    """

    network: Any

    def __init__(self, network: ShardedGPT, *, recompute_blocks: bool = False, chunks: int = 1):
        super().__init__(network, recompute_blocks=recompute_blocks, chunks=chunks)
        self._head_loss = shard_losses
        for name, value in network.head_options._asdict().items():
            if name not in SHARDED_HEAD_OPTIONS and value != HeadOptions._field_defaults.get(name):
                raise BadInput(
                    f"tensor_parallel: got {network.exchange.shards} shards of a network whose head has {name} "
                    f"{value!r}, which shard_losses in model/sharded_loss.py does not compute; set tensor_parallel to 1"
                )

    def _loss(self, hidden: Any, targets: Int[Tensor, "N"], reduction: str) -> Float[Tensor, "*N"]:
        losses = self._losses_of_chunk(targets, *hidden.tensors)
        return losses if reduction == "none" else losses.mean()

    def _loss_in_chunks(
        self, hidden: Any, targets: Int[Tensor, "N"], factors: Float[Tensor, "N"] | None
    ) -> Float[Tensor, ""]:
        losses = self._losses_in_chunks(hidden, targets)
        return (losses if factors is None else losses * factors).mean()

    def _loss_by_sequence(
        self, hidden: Any, targets: Int[Tensor, "B T"], factors: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B"]:
        losses = self._losses_in_chunks(hidden.flatten(0, 1), targets.flatten()).view(targets.shape)
        return (losses if factors is None else losses * factors).mean(dim=1)

    def _losses_in_chunks(self, hidden: Pieces, targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        """Return the loss of each token. In training, the backward pass recomputes the logits of each chunk."""
        parts = zip(*(x.chunk(self.chunks) for x in hidden.tensors), strict=True)
        run: Any = self._losses_of_chunk
        if self.chunks > 1 and self.training:
            run = partial(checkpoint, self._losses_of_chunk, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([run(ids, *part) for part, ids in zip(parts, targets.chunk(self.chunks), strict=True)])

    def _losses_of_chunk(self, targets: Int[Tensor, "N"], *hidden: Float[Tensor, "N C"]) -> Float[Tensor, "N"]:
        exchange, sums = self.network.exchange, []
        for shard, part, x in zip(exchange.local_shards, self.network.shards, hidden, strict=True):
            weight, options = part.output_weight(), part.head_options
            rows = len(weight)
            local = options._replace(vocabulary_size=min(max(options.vocabulary_size - shard * rows, 0), rows))
            sums.append(self._head_loss(x, weight, targets - shard * rows, local))
        losses: Tensor = JoinLosses.apply(exchange, torch.stack(sums))
        return losses


def shard_losses(
    hidden: Float[Tensor, "N C"], weight: Float[Tensor, "R C"], targets: Int[Tensor, "N"], options: HeadOptions
) -> Float[Tensor, "2 N"]:
    """Return two rows: the log-sum-exp of a shard's logits for each token, and the logit of each token's target.

    If another shard has the target's row, the target's logit is 0 here. Targets are relative to the first row of the
    shard, and `options.vocabulary_size` is the number of the shard's rows that are not padding.
    """
    rows = len(weight)
    logits = output_logits(hidden, weight, options._replace(vocabulary_size=rows)).float()
    if options.vocabulary_size < rows:
        padding = torch.arange(rows, device=logits.device) >= options.vocabulary_size
        logits = logits.masked_fill(padding, PADDING_LOGIT)
    local = torch.where((targets >= 0) & (targets < rows), targets, IGNORED)
    return torch.stack((logits.logsumexp(1), -F.nll_loss(logits, local, reduction="none", ignore_index=IGNORED)))


class JoinLosses(torch.autograd.Function):
    """Compute the loss of each of N tokens.

    `local_sums`, (L, 2, N), has the result of `shard_losses` for each of the L shards of this process.
    """

    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, local_sums: Float[Tensor, "L 2 N"]) -> Float[Tensor, "N"]:
        sums = exchange.all_gather(local_sums)  # (S, 2, N)
        log_sums, top = sums[:, 0], sums[:, 0].amax(0)
        log_sum = top + ordered_sum((log_sums - top).exp()).log()
        ctx.save_for_backward((local_sums[:, 0] - log_sum).exp())
        return log_sum - ordered_sum(sums[:, 1])

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "N"]) -> tuple[Any, ...]:
        [shares] = ctx.saved_tensors  # each shard's share of the probability, (L, N)
        return None, torch.stack((shares * gradient, -gradient.expand_as(shares)), dim=1)
