"""Budget of a run, --max-hours and --max-usd: when to stop so that the final checkpoint still fits."""

from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import option
from common.checks import number
from common.errors import BadInput
from common.text import dollars, paid_seconds
from model.config import ModelConfig
from training.telemetry.metrics_log import EarlyEnd
from training.telemetry.time_ledger import Spending, TimeLedger

END_SECONDS = 4.0  # the last chart, the end of the processes and of torchrun
WEIGHT_BYTES = 4  # fp32
SLOW_DISK_BYTES_PER_SECOND = 100e6  # assumed for the first save of a process
MOST_HOURS = 1e6
HOURS, USD = number(0, MOST_HOURS, above=True, example="3.5"), number(0, 1e9, above=True, example="14.32")
LIMITS = EarlyEnd.MAX_HOURS, EarlyEnd.MAX_USD  # options that stop a run
STEPS_AHEAD = 2  # the host runs a little ahead of a GPU


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Budget:
    """Limits of a run, its earlier jobs included; None: no limit."""

    max_hours: Annotated[
        float | None, option("stop with a checkpoint before the run exceeds this time", "HOURS", check=HOURS)
    ] = None
    max_usd: Annotated[
        float | None, option("stop with a checkpoint before the run exceeds this cost", "USD", check=USD)
    ] = None

    def seconds_left(self, spending: Spending) -> tuple[float, str] | None:
        """Return the seconds until the first limit, and the option that sets it; None without limits."""
        limits = []
        if self.max_hours is not None:
            limits.append((self.max_hours * 3600 - spending.elapsed_seconds(), EarlyEnd.MAX_HOURS))
        if self.max_usd is not None:
            usd = spending.usd()
            assert usd is not None and spending.price_per_hour is not None, "the command line asks for a price"
            limits.append((paid_seconds(self.max_usd - usd, spending.price_per_hour), EarlyEnd.MAX_USD))
        return min(limits, default=None)

    def reached(self, ledger: TimeLedger, save_seconds: float) -> bool:
        """Tell whether another step, `save_seconds` of saves and validation, and the end might not fit any more."""
        left = self.seconds_left(ledger)
        return left is not None and left[0] < STEPS_AHEAD * ledger.longest_step_seconds() + save_seconds + END_SECONDS

    def check_start(self, ledger: TimeLedger, save_seconds: float) -> None:
        """Raise BadInput when nothing is left to train with: a job that starts again and again would only cost."""
        left = self.seconds_left(ledger)
        if left is None or not self.reached(ledger, save_seconds):
            return
        given = self.max_hours if left[1] == EarlyEnd.MAX_HOURS else self.max_usd
        usd = ledger.usd()
        price = "" if usd is None else f", {dollars(usd)}"
        raise BadInput(
            f"{left[1]} {given:g}: the run has taken {ledger.elapsed_seconds() / 3600:.4g} hours{price}, this start "
            f"included, and to stop with a checkpoint takes {save_seconds + END_SECONDS:.0f} s more: nothing is left "
            f"to train with; raise {left[1]}",
            reason="out-of-budget",
        )


def expected_save_seconds(model: ModelConfig, optimizer_bytes: int) -> float:
    """Return the seconds of a save to a slow disk: for the first save of a process, until one has been measured."""
    from model.counts import parameter_count  # not for --help: it needs torch

    return (WEIGHT_BYTES * parameter_count(model) + optimizer_bytes) / SLOW_DISK_BYTES_PER_SECOND
