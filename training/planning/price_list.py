"""Price list: machines for rent, in a dated JSON file that users edit, and the expected run time on spot machines."""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import attrs

from common import checks
from common.errors import BadInput
from common.json_files import read_json
from common.text import nearest
from training.hardware.gpus import Gpu, find_gpu, known_gpus, read_entry, read_gpus

MACHINES = Path(__file__).with_name("machines.json")
# Four V100s, one in each of four AWS zones, had 202 preemptions in 431 hours of running, April 22 to 29, 2023:
# github.com/skypilot-org/spot-traces, preemption/1-node/aws-04-22-2023 (NSDI 24, Can't Be Late).
PREEMPTIONS_PER_HOUR = 0.47


def _is_date(value: Any) -> bool:
    try:
        return bool(date.fromisoformat(value))
    except (TypeError, ValueError):
        return False


_PRICE = checks.number(0.0, 1e6, above=True)
_DATE = checks.ValueCheck(_is_date, "the day of the prices, such as 2025-12-06")


@attrs.frozen(kw_only=True)
class Machine:
    """A machine of the list. Prices are in US dollars, for the whole machine."""

    name: str = attrs.field(validator=checks.text())
    gpu: Gpu = attrs.field(validator=checks.ValueCheck(lambda value: isinstance(value, Gpu), "the name of a GPU"))
    gpus: int = attrs.field(validator=checks.integer(1, 1_000_000))
    usd_per_hour: float = attrs.field(validator=_PRICE)
    # The price of the machine if the provider may preempt it
    spot_usd_per_hour: float | None = attrs.field(default=None, validator=checks.optional(_PRICE))
    # Throughput of this run on the whole machine, as measured by the user
    tokens_per_second: float | None = attrs.field(default=None, validator=checks.optional(checks.number(1.0)))
    # Date and source of this price; None if they are the same as for the whole list
    date: str | None = attrs.field(default=None, validator=checks.optional(_DATE))
    source: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))

    def times(self, nodes: int) -> "Machine":
        """Return one machine that represents `nodes` machines like this one. Its tokens/s are unknown."""
        name, spot = f"{nodes} x {self.name}", self.spot_usd_per_hour and nodes * self.spot_usd_per_hour
        nodes_as_one = attrs.evolve(self, name=name, gpus=nodes * self.gpus, tokens_per_second=None)
        return attrs.evolve(nodes_as_one, usd_per_hour=nodes * self.usd_per_hour, spot_usd_per_hour=spot)

    @property
    def spot(self) -> "Machine | None":
        """This machine at its spot price; None if the list has no spot price."""
        price, name = self.spot_usd_per_hour, f"{self.name} spot"
        return None if price is None else attrs.evolve(self, name=name, usd_per_hour=price, spot_usd_per_hour=None)


@attrs.frozen(kw_only=True)
class PriceList:
    """A price list that has been read and checked."""

    path: Path
    date: str = attrs.field(validator=_DATE)  # the day on which the prices were looked up
    source: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    preemptions_per_hour: float = attrs.field(default=PREEMPTIONS_PER_HOUR, validator=checks.number(0, 60, above=True))
    machines: tuple[Machine, ...]


@attrs.frozen(kw_only=True)
class Preemptions:
    """Preemptions of a machine, which happen at random times and without notice.

    The formulas are from J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS
    22 (2006), and J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    benchmarks/preempted_runs.py compares the formulas with simulated runs.
    """

    per_hour: float
    checkpoint_seconds: float  # seconds for which each checkpoint is assumed to stop training
    segments: float  # number of parts into which checkpoints divide the run

    def seconds(self, start_up: float, work: float) -> float:
        """Return the expected seconds of rent for a run that would need `work` seconds without preemptions.

        After a preemption, the machine starts up again and repeats the interrupted segment from its beginning. The
        start-up may be preempted, too. The result is infinite if it is too large for a float.
        """
        rate, segment = self.per_hour / 3600, work / self.segments + self.checkpoint_seconds
        try:
            return (
                math.expm1(rate * start_up) + self.segments * math.exp(rate * start_up) * math.expm1(rate * segment)
            ) / rate
        except OverflowError:
            return math.inf

    def best_interval_seconds(self, validation_seconds: float = 0.0) -> float:
        """Return Young's interval between checkpoints, in seconds of training.

        `validation_seconds` is the time of the validation that runs with each checkpoint.
        """
        return math.sqrt(2 * (self.checkpoint_seconds + validation_seconds) * 3600 / self.per_hour)


def shown(path: Path) -> str:
    """Return a path in the form in which messages show it: relative if it is inside the working directory."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def gpus_of(path: Path | None) -> dict[str, Gpu]:
    """Return all known GPUs, including those that a price list adds. Raises BadInput if the list is invalid."""
    return known_gpus() if path is None else known_gpus() | read_gpus(path, _read(path).get("gpus", {}))


def read_machines(path: Path, only: Sequence[str]) -> PriceList:
    """Read a price list with only the machines that `only` names, or with all machines if `only` is empty.

    Raises BadInput if the list is invalid; the error names the file and the machine.
    """
    values = _read(path)
    entries, gpus = values.pop("machines", None), known_gpus() | read_gpus(path, values.pop("gpus", {}))
    if not isinstance(entries, dict) or not entries:
        raise BadInput(f'{path}: wanted {{"date": "...", "machines": {{"NAME": {{...}}}}}}, like {shown(MACHINES)}')
    for name in only:
        if name not in entries:
            raise BadInput(f"{path}: --machine {name}: no such machine; {nearest(name, entries)}")
    machines = []
    for name in dict.fromkeys(only) or entries:
        where, entry = f"{path}: {name}", entries[name]
        if isinstance(entry, dict) and isinstance(entry.get("gpu"), str):
            entry = entry | {"gpu": find_gpu(entry["gpu"], gpus, f"{where}: gpu")}
        machines.append(read_entry(Machine, where, entry, name=name))
    return read_entry(PriceList, str(path), values, path=path, machines=tuple(machines))


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = read_json(path, advice=f"wanted a file like {shown(MACHINES)}")
    return values
