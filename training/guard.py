"""Guard: as soon as a loss or gradient norm is not finite, it blocks the update of that step and of all later steps.

The decision is made on the device, so that no rank waits for its GPU. It uses numbers that are the same on every rank,
so that all ranks make the same decision. Under elastic determinism, the decision is the same for any world size.
"""

import torch
from torch import Tensor

from training.parallel.process_group import Ranks, gather


class Guard:
    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._first_bad = torch.tensor(-1, device=ranks.device)  # the first bad step of the whole job; -1: none
        self._local_loss_bad = torch.tensor(False, device=ranks.device)  # whether a loss on this rank was not finite

    def observe(self, step: int, local_losses: Tensor, loss_and_norm: Tensor, excused: bool | Tensor) -> Tensor:
        """Return a scalar that is 1.0 if this step's update must be blocked, and otherwise 0.0.

        `step` is the number of updates before this one. `loss_and_norm`, (2,), has the loss of the global batch and the
        gradient norm before clipping; `local_losses` are the losses on this rank. The gradient norm of an `excused`
        step may be infinite or NaN, because fp16 gradients have overflowed; in that case, only this update is blocked.
        """
        finite = torch.isfinite(loss_and_norm)
        healthy = self._first_bad < 0
        self._local_loss_bad |= healthy & ~torch.isfinite(local_losses).all()
        bad = ~(finite[0] & (finite[1] | excused))
        self._first_bad.copy_(torch.where(healthy & bad, step, self._first_bad))
        return (~finite.all() | (self._first_bad >= 0)).float()

    def problem(self) -> str | None:
        """Return the problem that ends the run, or None. This waits for the GPU; call it on every rank."""
        step = int(self._first_bad.item())
        if step < 0:
            return None
        flags = gather(self._ranks, bool(self._local_loss_bad.item()))
        bad_ranks = [str(rank) for rank, flag in enumerate(flags) if flag]
        if bad_ranks:
            problem = f"the loss is not finite on rank {', '.join(bad_ranks)}"
        else:
            problem = "the gradient norm is not finite, although every loss is finite"
        return f"step {step + 1}: {problem}; the update was not applied"
