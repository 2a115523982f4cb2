"""Progress bar of a run in a terminal, plain lines elsewhere; rank 0 only."""

import sys
import time

import attrs
from tqdm import tqdm

from common.errors import printable

LINE_SECONDS = 10.0  # between plain lines, when stderr is not a terminal


@attrs.frozen(kw_only=True)
class Status:
    """The numbers of one logged step."""

    step: int
    loss: float
    tokens_per_second: float
    mfu: float | None
    remaining_seconds: float | None
    spent_usd: float | None
    remaining_usd: float | None


class ProgressBar:
    """Progress of a run on stderr."""

    def __init__(self, first_step: int, steps: int):
        self._steps = steps
        self._last_line = 0.0
        self._warning: str | None = None
        self._bar = (
            tqdm(
                total=steps,
                initial=first_step,
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
            if sys.stderr.isatty()
            else None
        )

    def advance(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.update()

    def show(self, status: Status) -> None:
        """Show the numbers of a logged step."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._line(status))
        elif time.monotonic() - self._last_line >= LINE_SECONDS or status.step == self._steps:
            self._last_line = time.monotonic()
            self.say(f"step {status.step:,}/{self._steps:,}  {self._line(status)}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        tqdm.write(printable(line), file=sys.stderr)

    def warn(self, warning: str | None) -> None:
        """Show a warning beside the numbers; None removes it."""
        self._warning = warning

    def _line(self, status: Status) -> str:
        return describe(status) if self._warning is None else f"{describe(status)}  {self._warning}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def describe(status: Status) -> str:
    """Return the numbers as one line."""
    parts = [f"loss {status.loss:.4f}", f"{status.tokens_per_second:,.0f} tok/s"]
    if status.mfu is not None:
        parts.append(f"MFU {status.mfu:.1%}")
    if status.remaining_seconds is not None:
        parts.append(f"ETA {duration(status.remaining_seconds)}")
    if status.spent_usd is not None:
        to_go = "" if status.remaining_usd is None else f", ${status.remaining_usd:,.2f} to go"
        parts.append(f"${status.spent_usd:,.2f} spent{to_go}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration for people: 42s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
