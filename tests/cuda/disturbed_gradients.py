"""Script around train.py: in the self-test gradients overflow twice, and one of rank 1 is another one each time."""

import itertools
import math
import sys
from typing import Any

import torch

import train
from training import self_test
from training.parallel.mesh import local_tensor

NORMS = itertools.chain([math.inf] * 2, itertools.repeat(1.0))
plain, counter = self_test.run_microbatches, itertools.count()


def disturbed(state: Any, settings: Any, step: int, next_batch: Any) -> Any:
    """Run micro-batches; on rank 1 write other numbers into a gradient, by a copy, as kernels do nothing."""
    losses = plain(state, settings, step, next_batch)
    if state.parallel.data_parallel.rank == 1:
        gradient = local_tensor(state.parallel.named_parameters()["final_norm.weight"].grad)
        gradient.copy_(torch.full(gradient.shape, float(next(counter))))
    return losses


self_test.run_microbatches = disturbed
self_test.ordered_grad_norm = lambda _: torch.tensor(next(NORMS)).cuda()
sys.argv[0] = "train.py"
train.leave(train.main())
