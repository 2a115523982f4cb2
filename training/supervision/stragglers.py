"""Stragglers: ranks that take longer than the others for their own part of a step, judged from all beats by rank 0.

Communication is seen only as a whole. After its last gradient the latest rank waits for nobody, but for the reduction:
where that takes longer than it did before in this job, the network is slow, or ranks are late in turns. Whose link it
is cannot be told, as all wait for it alike.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from training.parallel.step_clock import StepSeconds
from training.supervision.beats import Beat

WINDOW_SECONDS = 10.0  # between judgements
WINDOWS = 3  # in a row, until something counts as slow, or as no longer slow
MARGIN = 0.2  # of the median rank's own seconds
COMMUNICATION_MARGIN = 0.5  # of a step's seconds at best: a mean over all ranks' waits is less steady
LEAST_SECONDS = 0.01  # a step, more than usual: less is noise
ALL = -1  # in the place of a rank

Phase = Literal["data", "compute", "communication"]


@attrs.frozen(kw_only=True)
class Slowness:
    """Slowness in a window."""

    phase: Phase
    factor: float  # own seconds a step, as a multiple of the median rank's; all ranks': of the step's at best


@attrs.frozen(kw_only=True)
class Straggling:
    """A change: ranks have become slow, or no longer are."""

    ranks: list[int]
    name: str  # of these ranks, with host and node
    slowness: Slowness | None  # None: no longer slow
    mark: str | None  # all that are slow now

    def line(self) -> str:
        if self.slowness is None:
            return f"{self.name}: no longer slow"
        than = "at best" if self.slowness.phase == "communication" else "the median rank"
        seconds = WINDOW_SECONDS * WINDOWS
        times = f"{self.slowness.factor:.1f} times as slow as {than} for {seconds:.0f} s"
        return f"{self.name}: {times}, in {self.slowness.phase}"


class Stragglers:
    """Judge of a job's ranks, window by window."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._before: dict[int, StepSeconds] = {}
        self._least_rest: float | None = None
        self._named: set[int] = set()  # slow ranks, or ALL
        self._contradictions: Counter[int] = Counter()  # windows in a row

    def judge(self, beats: Mapping[int, Beat]) -> list[Straggling]:
        """Return what has changed. A window lasts until every rank has taken a step in it."""
        totals = {rank: beat.seconds for rank, beat in beats.items()}
        if not len(totals) == self._world_size > 1:
            return []
        before = self._before or totals
        if any(totals[rank].steps == before[rank].steps for rank in totals):
            self._before = before
            return []
        self._before = totals
        slow = self._slow({rank: _mean(before[rank], totals[rank]) for rank in sorted(totals)})
        turned = self._turned(slow)
        self._named ^= {*turned}
        begun, ended = [rank for rank in turned if rank in slow], [rank for rank in turned if rank not in slow]
        return [self._straggling(ranks, slow, beats) for ranks in _by_node(begun, beats) + _by_node(ended, beats)]

    def _slow(self, means: dict[int, StepSeconds]) -> dict[int, Slowness]:
        """Return what is slow in a window, in whose mean step."""
        slow = {}
        for rank, mean in means.items():
            peers = [other for peer, other in means.items() if peer != rank]
            usual = _median(peer.own for peer in peers)
            excess = mean.own - usual
            if excess > max(MARGIN * usual, LEAST_SECONDS):
                in_data = mean.data - _median(peer.data for peer in peers) > excess / 2
                slow[rank] = Slowness(phase="data" if in_data else "compute", factor=round(mean.own / usual, 2))
        rest = min(mean.whole - mean.own for mean in means.values())
        self._least_rest = least = rest if self._least_rest is None else min(rest, self._least_rest)
        own = max(mean.own for mean in means.values())
        if rest - least > max(COMMUNICATION_MARGIN * (own + least), LEAST_SECONDS):
            slow[ALL] = Slowness(phase="communication", factor=round((own + rest) / (own + least), 2))
        return slow

    def _turned(self, slow: dict[int, Slowness]) -> list[int]:
        """Return what has for long enough been slow and is not named, or the other way round."""
        contradicting = slow.keys() ^ self._named
        self._contradictions = Counter({rank: self._contradictions[rank] + 1 for rank in contradicting})
        turned = sorted(rank for rank, windows in self._contradictions.items() if windows == WINDOWS)
        for rank in turned:
            del self._contradictions[rank]
        return turned

    def _straggling(self, ranks: list[int], slow: dict[int, Slowness], beats: Mapping[int, Beat]) -> Straggling:
        names = ["all ranks" if rank == ALL else f"rank {rank}" for rank in sorted(self._named)]
        slowest = max((slow[rank] for rank in ranks if rank in slow), key=lambda found: found.factor, default=None)
        return Straggling(
            ranks=sorted(beats) if ranks == [ALL] else ranks,
            name=_name(ranks, beats),
            slowness=slowest,
            mark=f"SLOW: {', '.join(names)}" if names else None,
        )


def _by_node(ranks: list[int], beats: Mapping[int, Beat]) -> list[list[int]]:
    """Return lists of one, or of all ranks of a node where all are among them."""
    groups = []
    for rank in ranks:
        mates = [rank] if rank == ALL else [mate for mate in sorted(beats) if beats[mate].node == beats[rank].node]
        group = mates if {*mates} <= {*ranks} else [rank]
        if group not in groups:
            groups.append(group)
    return groups


def _name(ranks: list[int], beats: Mapping[int, Beat]) -> str:
    if ranks == [ALL]:
        return "all ranks"
    host, node = beats[ranks[0]].host, beats[ranks[0]].node
    if len(ranks) == 1:
        return f"rank {ranks[0]} (host {host}, node {node})"
    return f"node {node} (host {host}, ranks {', '.join(map(str, ranks))})"


def _median(values: Iterable[float]) -> float:
    return statistics.median_low(list(values))


def _mean(before: StepSeconds, after: StepSeconds) -> StepSeconds:
    """Return the mean step between two totals."""
    steps = after.steps - before.steps
    return StepSeconds(
        steps=1,
        whole=(after.whole - before.whole) / steps,
        own=(after.own - before.own) / steps,
        data=(after.data - before.data) / steps,
    )
