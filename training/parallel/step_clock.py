"""Step clock: the seconds of a rank's steps in which it works itself, without those in which it waits for others.

Ranks in lockstep have one step time, and of them the slow one waits least. Own work lasts from the begin of a step to
its last gradient, without what waits for other ranks in between: reductions of gradients and, under FSDP, the first
weights of a pass. FSDP's later waits for weights are not seen, nor those for ranks that share layers: own work includes
them. After it come the end of the reduction and the update.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from common.output import advisory

Mark = Any  # a moment: time.perf_counter(), or on a GPU an event in its compute stream


@attrs.frozen(kw_only=True)
class StepSeconds:
    steps: int = 0
    own: float = 0.0


class StepClock:
    """Times steps of this rank. The host never waits for a GPU's marks: steps count once their marks have passed."""

    def __init__(self, device: torch.device):
        self.totals = StepSeconds()
        self._device = device
        self._steps: deque[list[tuple[Mark, Mark]]] = deque()  # own work of steps whose marks have not passed
        self._since: Mark | None = None  # of own work
        self._own: list[tuple[Mark, Mark]] = []  # of the current step

    @contextmanager
    def timed(self) -> Iterator[None]:
        with advisory("step clock"):
            while self._steps and _passed(self._steps[0][-1][1]):
                own = sum(_seconds(begin, end) for begin, end in self._steps.popleft())
                self.totals = StepSeconds(steps=self.totals.steps + 1, own=self.totals.own + own)
            self._own, self._since = [], self._mark()
        yield
        with advisory("step clock"):
            assert self._since is not None
            self._steps.append(self._own or [(self._since, self._mark())])
            self._since = None

    def begin_waiting(self) -> None:
        """End own work for now; does nothing outside a timed step."""
        if self._since is None:
            return
        if self._own and self._own[-1][0] is self._since:  # it went on beside a reduction
            self._own.pop()
        self._own.append((self._since, self._mark()))

    def end_waiting(self) -> None:
        if self._since is not None:
            self._since = self._mark()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Context of one reduction of gradients, in a backward pass, which goes on beside it on a GPU."""
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
