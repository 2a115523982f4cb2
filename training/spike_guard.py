"""Spike guard: skips or stops at updates from a non-finite loss or gradient norm, or from a spike in either.

Decided on the device, from numbers that are the same on every rank: no rank waits for its GPU, all take the same
decision, and under elastic determinism it is the same on any world size.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from common import checks
from common.errors import quoted
from common.json_files import is_number
from training.config.key_groups import SpikeOptions
from training.parallel.process_group import Ranks, gather

MEASURED = ("loss", "gradient norm")  # rows of every (2, ...) tensor here
SMALLEST_DEVIATION = 1e-3  # share of the mean: in a flat window the standard deviation is rounding


@attrs.frozen(kw_only=True)
class Spike:
    """A step with a loss or gradient norm far above those before it."""

    step: int  # the first is 1
    what: str  # one of MEASURED
    value: float
    zscore: float
    mean: float  # mean of the window
    window_steps: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.what} {self.value:.4g} lies {self.zscore:.1f} standard deviations above the "
            f"mean {self.mean:.4g} of the last {self.window_steps} steps"
        )


@attrs.frozen(kw_only=True)
class Skips:
    """Skipped steps since the last report."""

    count: int
    total: int  # in the whole run
    last: Spike


@attrs.frozen(kw_only=True)
class SpikeHistory:
    """Spike window in a checkpoint: exact numbers, oldest first."""

    losses: list[float]
    grad_norms: list[float] = attrs.field()
    skipped_steps: int = attrs.field(validator=checks.integer(0))

    @grad_norms.validator
    def _check(self, _: Any, value: list[float]) -> None:
        if len(value) != len(self.losses) or not all(map(is_number, self.losses + value)):
            raise ValueError(f"grad_norms: got {quoted(value)}, wanted as many finite numbers as losses")


class Guard:
    """Blocks updates: all from the first bad step on, or single spikes with `on_spike` "skip".

    A bad step is not finite or, with `on_spike` "stop", a spike.
    """

    def __init__(self, ranks: Ranks, options: SpikeOptions):
        self._ranks = ranks
        self._on_spike = options.on_spike
        self._window = None if options.on_spike is None else SpikeWindow(options, ranks.device)
        self._skips_told = 0
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
        held = ~finite.all()
        if self._window is not None:
            spike = self._window.observe(step, measured, healthy & finite.all())
            held = held | spike
            if self._on_spike == "stop":
                bad = bad | spike
        self._first_bad.copy_(torch.where(healthy & bad, step, self._first_bad))
        return (held | (self._first_bad >= 0)).float()

    def problem(self) -> str | None:
        """Return the problem that ends the run, or None. Waits for the GPU; call it on every rank."""
        step = int(self._first_bad.item())
        if step < 0:
            return None
        spike = None if self._window is None else self._window.last()
        if spike is not None and spike.step == step + 1:
            advice = f'--replay {spike.step} {spike.step} shows it, on_spike "skip" goes past it'
            return f"{spike}; the update was not applied; {advice}"
        flags = gather(self._ranks, bool(self._own_loss_bad.item()))
        bad = [str(rank) for rank, flag in enumerate(flags) if flag]
        what = f"loss is not finite on rank {', '.join(bad)}" if bad else "gradient norm is not finite, every loss is"
        return f"step {step + 1}: {what}; the update was not applied"

    def metrics(self) -> dict[str, int]:
        """Return the metrics of a logged step: the count of skipped steps, if they are skipped. Waits for the GPU."""
        if self._window is None or self._on_spike != "skip":
            return {}
        return {"skipped_steps": self._window.spikes()}

    def new_skips(self) -> Skips | None:
        """Return the skips since the last call or load, or None. Waits for the GPU."""
        if self._window is None or self._on_spike != "skip":
            return None
        total, last = self._window.spikes(), self._window.last()
        if last is None or total == self._skips_told:
            return None
        count, self._skips_told = total - self._skips_told, total
        return Skips(count=count, total=total, last=last)

    def state(self) -> SpikeHistory | None:
        """Return the state for a checkpoint; None without `on_spike`."""
        return None if self._window is None else self._window.state()

    def load(self, state: SpikeHistory | None) -> None:
        """Continue from a checkpoint; one without `on_spike` leaves the window empty."""
        if self._window is not None and state is not None:
            self._window.load(state)
            self._skips_told = self._window.spikes()


class SpikeWindow:
    """Losses and gradient norms of the last finite steps, spikes included, so that it adapts to a lasting change."""

    def __init__(self, options: SpikeOptions, device: torch.device):
        self._size, self._zscore = options.spike_window, options.spike_zscore
        self._positions = torch.arange(self._size, device=device)
        self._rows = torch.arange(len(MEASURED), dtype=torch.float64, device=device)
        self._values = torch.zeros(len(MEASURED), self._size, dtype=torch.float64, device=device)  # the newest last
        self._filled = torch.tensor(0, device=device)  # positions, counted from the end; zeros before them
        self._spikes = torch.tensor(0, device=device)
        # The last spike: step, row of MEASURED, value, z-score, mean, steps in the window.
        self._last_spike = torch.full((6,), -1.0, dtype=torch.float64, device=device)

    def observe(self, step: int, measured: Tensor, counts: Tensor) -> Tensor:
        """Return whether the step is a spike over those before it, a bool scalar, and let it enter the window.

        A step that does not count, bool scalar, is no spike and enters nothing.
        """
        values = measured.double()  # (2,)
        mean, deviation = self._statistics()
        zscores = (values - mean) / deviation  # (2,); nan where both are zero, which is no spike
        high = zscores > self._zscore
        spike = counts & (2 * self._filled >= self._size) & high.any()
        steps, filled = torch.full_like(values, step), self._filled.expand(len(MEASURED))
        numbers = torch.stack([steps, self._rows, values, zscores, mean, filled], dim=1)  # (2, 6)
        reported = torch.where(high[0], numbers[0], numbers[1])  # the loss, where both are high
        self._last_spike.copy_(torch.where(spike, reported, self._last_spike))
        self._spikes += spike
        shifted = torch.cat([self._values[:, 1:], values[:, None]], dim=1)
        self._values.copy_(torch.where(counts, shifted, self._values))
        self._filled.copy_(torch.where(counts, (self._filled + 1).clamp(max=self._size), self._filled))
        return spike

    def last(self) -> Spike | None:
        """Return the last spike that this process saw. Waits for the GPU."""
        step, row, value, zscore, mean, filled = self._last_spike.tolist()
        if step < 0:
            return None
        what = MEASURED[int(row)]
        return Spike(step=int(step) + 1, what=what, value=value, zscore=zscore, mean=mean, window_steps=int(filled))

    def spikes(self) -> int:
        """Return how many spikes the run has had. Waits for the GPU."""
        return int(self._spikes.item())

    def state(self) -> SpikeHistory:
        """Return the window for a checkpoint: exact numbers, oldest first."""
        losses, grad_norms = self._values[:, self._size - int(self._filled.item()) :].tolist()
        return SpikeHistory(losses=losses, grad_norms=grad_norms, skipped_steps=self.spikes())

    def load(self, state: SpikeHistory) -> None:
        """Continue from a checkpoint; a window of another size begins with the newest steps that fit into it."""
        kept = torch.tensor([state.losses, state.grad_norms], dtype=torch.float64)[:, -self._size :]
        filled = kept.shape[1]
        self._values.zero_()
        self._values[:, self._size - filled :] = kept.to(self._values.device)
        self._filled.fill_(filled)
        self._spikes.fill_(state.skipped_steps)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the filled positions, (2,) each; nan in an empty window."""
        filled = self._positions >= self._size - self._filled  # (window,)
        mean = self._values.sum(dim=1) / self._filled
        distances = torch.where(filled, self._values - mean[:, None], 0.0)  # (2, window)
        deviation = (distances.square().sum(dim=1) / self._filled).sqrt()
        return mean, torch.maximum(deviation, SMALLEST_DEVIATION * mean)
