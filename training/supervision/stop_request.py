"""Stop request: any rank's wish to stop early, agreed on by all ranks."""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from training.parallel.process_group import Ranks


class StopRequest:
    """Agreement to stop: `asked` is set by a signal, `condition` is this rank's own, such as a used-up budget."""

    def __init__(self, ranks: Ranks, asked: threading.Event, condition: Callable[[], bool]):
        self.signalled = False  # the last agreement was on a signal
        self._ranks = ranks
        self._asked = asked
        self._condition = condition

    def agreed(self) -> bool:
        """Tell whether any rank wants to stop. All ranks call it at the same place and get the same answer."""
        wish = 2.0 if self._asked.is_set() else float(self._condition())
        flag = torch.tensor([wish])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.control)
        self.signalled = flag.item() == 2.0
        return flag.item() > 0
