"""The step clock measures a rank's own work: the time of its steps, minus the time spent waiting for other ranks.

All ranks have the same step time, because they move in lockstep; a slow rank is the one that waits least. A rank's own
work lasts from the beginning of a step to its last gradient, minus the waits in between: for reductions of gradients
and, under FSDP, for the first weights of a pass. FSDP's later waits for weights, and waits for ranks that share layers,
are not measured, so they count as own work. The end of the reduction and the update come after the last gradient, so
they are not counted.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from common.output import advisory

Mark = Any  # a point in time: time.perf_counter() or, on a GPU, an event in its compute stream


@attrs.frozen(kw_only=True)
class StepSeconds:
    steps: int = 0
    own: float = 0.0  # seconds of own work


class StepClock:
    """Times the steps of this rank.

    The host never waits for a GPU: a step is counted once the GPU has passed all of the step's marks.
    """

    def __init__(self, device: torch.device):
        self.totals = StepSeconds()
        self._device = device
        self._steps: deque[list[tuple[Mark, Mark]]] = deque()  # own work of steps that are not counted yet
        self._since: Mark | None = None  # start of the current interval of own work; None outside a timed step
        self._intervals: list[tuple[Mark, Mark]] = []  # own work of the current step

    @contextmanager
    def timed(self) -> Iterator[None]:
        with advisory("step clock"):
            while self._steps and _passed(self._steps[0][-1][1]):
                seconds = sum(_seconds(begin, end) for begin, end in self._steps.popleft())
                self.totals = StepSeconds(steps=self.totals.steps + 1, own=self.totals.own + seconds)
            self._intervals, self._since = [], self._mark()
        yield
        with advisory("step clock"):
            assert self._since is not None
            self._steps.append(self._intervals or [(self._since, self._mark())])
            self._since = None

    def begin_waiting(self) -> None:
        """End an interval of the rank's own work, because the rank has to wait. Does nothing outside a timed step."""
        if self._since is None:
            return
        if self._intervals and self._intervals[-1][0] is self._since:  # own work continued during a reduction
            self._intervals.pop()
        self._intervals.append((self._since, self._mark()))

    def end_waiting(self) -> None:
        if self._since is not None:
            self._since = self._mark()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Time one reduction of gradients, as a context manager.

        On a GPU, the backward pass continues during the reduction.
        """
        self.begin_waiting()
        yield
        if self._device.type != "cuda":
            self.end_waiting()

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.default_stream(self._device))
        return event


def _passed(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()


def _seconds(begin: Mark, end: Mark) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
