"""Script around train.py: in step 2 the guard sees a spike, if it looks for them, else a loss that is not finite.

Kernels, which do nothing, find neither.
"""

import sys
from typing import Any

import torch

import train
from training.spike_guard import Guard

BAD_STEP = 1  # counted from 0
observe = Guard.observe


def judged(guard: Guard, step: int, *measured: Any) -> Any:
    """Observe a step; write by copies what it is to have found."""
    held = observe(guard, step, *measured)
    if step == BAD_STEP and guard._window is not None:
        guard._window._spikes.copy_(torch.tensor(1))
        guard._window._last_spike.copy_(torch.tensor([step, 0, 9.0, 8.0, 1.0, 2.0]))
    elif step == BAD_STEP:
        guard._first_bad.copy_(torch.tensor(step))
        guard._own_loss_bad.copy_(torch.tensor(guard._ranks.rank == 1))
    return held


Guard.observe = judged
sys.argv[0] = "train.py"
train.leave(train.main())
