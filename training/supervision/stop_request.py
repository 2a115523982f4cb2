"""Stop request: a signal or a used-up budget, agreed on by all ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from training.parallel.process_group import Ranks
from training.supervision.signals import StopSignals


class StopRequest:
    """A wish to stop early, by a signal or by a rank's own condition, agreed on by all ranks."""

    def __init__(self, ranks: Ranks, signals: StopSignals):
        self.condition: Callable[[], bool] = lambda: False  # of this rank; the loop's: the budget is used up
        self.signalled = False  # the wish that was agreed on last was a signal's
        self._ranks = ranks
        self._signals = signals

    def agreed(self) -> bool:
        """Tell whether any rank wishes it. All ranks call it at the same place and get the same answer."""
        wish = 2.0 if self._signals.asked else float(self.condition())
        flag = torch.tensor([wish])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.control)
        self.signalled = flag.item() == 2.0
        return flag.item() > 0
