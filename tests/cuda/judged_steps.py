"""Script around train.py: in step 2 the guard sees a loss that is not finite; kernels, which do nothing, find none."""

import sys
from typing import Any

import torch

import train
from training.guard import Guard

BAD_STEP = 1  # counted from 0
observe = Guard.observe


def judged(guard: Guard, step: int, *measured: Any) -> Any:
    """Observe a step; write by copies what it is to have found."""
    held = observe(guard, step, *measured)
    if step == BAD_STEP:
        guard._first_bad.copy_(torch.tensor(step))
        guard._own_loss_bad.copy_(torch.tensor(guard._ranks.rank == 1))
    return held


Guard.observe = judged
sys.argv[0] = "train.py"
train.leave(train.main())
