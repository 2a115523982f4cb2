"""Progress bar of a run in a terminal, plain lines elsewhere; rank 0 only."""

import sys
import time

from tqdm import tqdm

from common.errors import Notice, printable

LINE_SECONDS = 10.0  # between plain lines, when stderr is not a terminal


class ProgressBar:
    def __init__(self, first_step: int, steps: int):
        self._last_line = 0.0
        self._warnings: dict[str, str] = {}  # by topic
        tqdm.monitor_interval = 0  # it would watch bars from a thread of its own
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            disable=None,  # where stderr is no terminal
        )

    def advance(self) -> None:
        self._bar.update()

    def show(self, step: int, numbers: str) -> None:
        line = "  ".join([numbers, *self._warnings.values()])
        self._bar.set_postfix_str(line)
        if self._bar.disable and (time.monotonic() - self._last_line >= LINE_SECONDS or step == self._bar.total):
            self._last_line = time.monotonic()
            self.say(f"step {step:,}/{self._bar.total:,}  {line}")

    def say(self, line: str | Notice) -> None:
        tqdm.write(printable(str(line)), file=sys.stderr)

    def warn(self, topic: str, warning: str | None) -> None:
        """Show a warning beside the numbers, in the place of an earlier one of its topic; None removes that."""
        self._warnings.pop(topic, None)
        if warning is not None:
            self._warnings[topic] = warning

    def close(self) -> None:
        self._bar.close()


def duration(seconds: float) -> str:
    """Return a duration for people: 42s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
