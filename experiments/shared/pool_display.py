"""Show the progress of a pool of runs: a line for each event and, in a terminal, a progress bar."""

import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from common.output import progress, show
from common.text import duration
from experiments.shared.account import Account
from experiments.shared.run_progress import Target, logged_step

SHOW_SECONDS = 2.0  # time between updates of the bar


class PoolDisplay:
    """The progress of one call of `RunPool.reach`: a line for each event and, in a terminal, a bar over all steps."""

    def __init__(self, targets: Sequence[Target], account: Account):
        self._targets, self._account = targets, account
        self._first, self._total = self._steps(), sum(target.step for target in targets)
        self._began = self._shown = time.monotonic()
        self._bar = tqdm(
            total=self._total,
            initial=self._first,
            unit="step",
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
            disable=not sys.stderr.isatty() or self._first == self._total,
        )

    def close(self) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line with the number of finished runs, the time and money spent, and the estimated time left."""
        text, steps, seconds = self._spent(), self._steps(), time.monotonic() - self._began
        if self._first < steps < self._total:
            text += f"; about {duration((self._total - steps) * seconds / (steps - self._first))} left"
        show(progress(f"{line} ({text})"))

    def show(self) -> None:
        """Update the progress bar, at most every SHOW_SECONDS."""
        if self._bar.disable or time.monotonic() - self._shown < SHOW_SECONDS:
            return
        self._shown = time.monotonic()
        self._bar.set_postfix_str(self._spent(), refresh=False)
        self._bar.n = self._steps()
        self._bar.refresh()

    def _spent(self) -> str:
        done = sum(target.done for target in self._targets)
        return f"{done} of {len(self._targets)} runs; {self._account.describe()}"

    def _steps(self) -> int:
        return sum(
            target.step if target.done else min(logged_step(target.directory), target.step) for target in self._targets
        )
