"""Guard: blocks all updates from the first loss or gradient norm on that is not finite.

Decided on the device, from numbers that are the same on every rank: no rank waits for its GPU, all take the same
decision, and under elastic determinism it is the same on any world size.
"""

import torch
from torch import Tensor

from training.parallel.process_group import Ranks, gather


class Guard:
    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._first_bad = torch.tensor(-1, device=ranks.device)  # step, of the whole job
        self._own_loss_bad = torch.tensor(False, device=ranks.device)

    def observe(self, step: int, own_losses: Tensor, measured: Tensor, excused: bool | Tensor) -> Tensor:
        """Judge a step by the job's loss and gradient norm before clipping, (2,); `step` counts updates before it.

        Returns a scalar: 1.0 to block the update, else 0.0. An excused step may have a non-finite gradient norm: fp16
        overflowed, and this one update is blocked.
        """
        finite = torch.isfinite(measured)
        healthy = self._first_bad < 0
        self._own_loss_bad |= healthy & ~torch.isfinite(own_losses).all()
        bad = ~(finite[0] & (finite[1] | excused))
        self._first_bad.copy_(torch.where(healthy & bad, step, self._first_bad))
        return (~finite.all() | (self._first_bad >= 0)).float()

    def problem(self) -> str | None:
        """Return the problem that ends the run, or None. Waits for the GPU; call it on every rank."""
        step = int(self._first_bad.item())
        if step < 0:
            return None
        flags = gather(self._ranks, bool(self._own_loss_bad.item()))
        bad = [str(rank) for rank, flag in enumerate(flags) if flag]
        what = f"loss is not finite on rank {', '.join(bad)}" if bad else "gradient norm is not finite, every loss is"
        return f"step {step + 1}: {what}; the update was not applied"
