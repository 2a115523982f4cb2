"""Command-line options of a pool of training jobs: how many side by side, on what, under which budget."""

from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import UsageError, option
from common.checks import integer
from training.command import WORLD_SIZE, Device
from training.planning.budget import HOURS, USD


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class PoolOptions:
    """Options of an experiment's training jobs. The budget counts earlier calls of the same experiment."""

    at_once: Annotated[
        int | None,
        option(
            "runs side by side; default: as many as the GPUs, or on a CPU the cores, hold",
            "K",
            check=integer(1, 1 << 16),
        ),
    ] = None
    ranks: Annotated[int, option("ranks of each run, under torchrun", "R", check=WORLD_SIZE)] = 1
    device: Device = None
    price_per_hour: Annotated[float | None, option("price of the machine", "USD", check=USD)] = None
    max_hours: Annotated[
        float | None,
        option("never exceed this wall-clock time, earlier calls included; runs stop before", "HOURS", check=HOURS),
    ] = None
    max_usd: Annotated[float | None, option("never exceed this cost, earlier calls included", "USD", check=USD)] = None

    def __attrs_post_init__(self) -> None:
        if self.max_usd is not None and self.price_per_hour is None:
            raise UsageError("--max-usd needs --price-per-hour, the price of the machine")
