"""The budget of a run, --max-hours and --max-usd: when to stop so that there is time for the final checkpoint."""

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

END_SECONDS = 4.0  # time to draw the last chart, and to end the processes and torchrun
WEIGHT_BYTES = 4  # fp32
SLOW_DISK_BYTES_PER_SECOND = 100e6  # assumed for the first save of a process
MOST_HOURS = 1e6
HOURS, USD = number(0, MOST_HOURS, above=True, example="3.5"), number(0, 1e9, above=True, example="14.32")
LIMITS = EarlyEnd.MAX_HOURS, EarlyEnd.MAX_USD  # the options that stop a run
STEPS_AHEAD = 2  # steps that must still fit into the budget, because the host runs slightly ahead of a GPU


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Budget:
    """Limits for a run, including its earlier jobs, or for all jobs of an experiment. None means no limit."""

    max_hours: Annotated[
        float | None,
        option(
            "stop with a checkpoint before the total time, including earlier jobs, exceeds this limit",
            "HOURS",
            check=HOURS,
        ),
    ] = None
    max_usd: Annotated[
        float | None,
        option(
            "stop with a checkpoint before the total cost, including earlier jobs, exceeds this limit; needs "
            "--price-per-hour",
            "USD",
            check=USD,
        ),
    ] = None

    def seconds_left(self, spending: Spending) -> tuple[float, str] | None:
        """Return the seconds until the first limit, and the option that sets this limit; None without limits."""
        limits = []
        if self.max_hours is not None:
            limits.append((self.max_hours * 3600 - spending.elapsed_seconds(), EarlyEnd.MAX_HOURS))
        if self.max_usd is not None:
            usd = spending.usd()
            assert usd is not None and spending.price_per_hour is not None, "the command line requires a price"
            limits.append((paid_seconds(self.max_usd - usd, spending.price_per_hour), EarlyEnd.MAX_USD))
        return min(limits, default=None)

    def reached(self, ledger: TimeLedger, save_seconds: float) -> bool:
        """Return whether the budget may be too small for another step and for ending the job afterwards.

        `save_seconds` is the time that the saves and the validation at the end of the job need.
        """
        nearest = self.seconds_left(ledger)
        if nearest is None:
            return False
        remaining, _ = nearest
        return remaining < STEPS_AHEAD * ledger.longest_step_seconds() + save_seconds + END_SECONDS

    def check_start(self, ledger: TimeLedger, save_seconds: float) -> None:
        """Raise BadInput if the budget leaves no time for training.

        Without this check, a job that is restarted repeatedly would cost money without any progress.
        """
        nearest = self.seconds_left(ledger)
        if nearest is None or not self.reached(ledger, save_seconds):
            return
        _, option_name = nearest
        limit = self.max_hours if option_name == EarlyEnd.MAX_HOURS else self.max_usd
        usd = ledger.usd()
        cost = "" if usd is None else f" and {dollars(usd)}"
        raise BadInput(
            f"{option_name} {limit:g}: including this start, the run has taken {ledger.elapsed_seconds() / 3600:.4g} "
            f"hours{cost}. Stopping with a checkpoint takes another {save_seconds + END_SECONDS:.0f} s, so no "
            f"time is left for training; raise {option_name}",
            reason="out-of-budget",
        )


def expected_save_seconds(model: ModelConfig, optimizer_bytes: int) -> float:
    """Return an estimate of a save's seconds on a slow disk. It is used until a save has been measured."""
    from model.counts import parameter_count  # imported here because it needs torch, which --help must not import

    return (WEIGHT_BYTES * parameter_count(model) + optimizer_bytes) / SLOW_DISK_BYTES_PER_SECOND
