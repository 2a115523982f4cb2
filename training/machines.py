"""Machines that one can rent: a dated price list, a JSON file that people edit."""

from datetime import date
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput, nearest, quoted
from json_files import read_json
from model import checks
from training.memory import GPU_GIB

MACHINES = Path(__file__).with_name("machines.json")


@attrs.frozen(kw_only=True)
class Machine:
    """One line of the list; prices in US dollars."""

    name: str = attrs.field(validator=checks.text())
    gpu: str = attrs.field(validator=lambda _, __, value: _check_gpu(value))
    gpus: int = attrs.field(validator=checks.integer(1, 1_000_000))
    usd_per_hour: float = attrs.field(validator=checks.number(0.0, 1e6, above=True))  # of the whole machine
    tokens_per_second: float | None = attrs.field(
        default=None, validator=checks.optional(checks.number(1.0))
    )  # of the whole machine, where the list's owner has measured the run there


@attrs.frozen(kw_only=True)
class PriceList:
    """A file of machines."""

    path: Path
    date: str = attrs.field(validator=lambda _, __, value: _check_date(value))  # when the prices were read
    source: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    machines: tuple[Machine, ...]


def read_machines(path: Path, only: list[str]) -> PriceList:
    """Read a price list; of its machines those named by `only`, or all. Raises BadInput naming file and machine."""
    values = read_json(path, advice=f"wanted a file like {MACHINES}")
    entries = values.get("machines")
    if not isinstance(entries, dict) or not entries:
        raise BadInput(f'{path}: wanted {{"date": "...", "machines": {{"NAME": {{...}}}}}}, like {MACHINES}')
    for name in only:
        if name not in entries:
            raise BadInput(f"{path}: --machine {name}: no such machine{nearest(name, entries)}")
    machines = tuple(
        _build(Machine, f"{path}: {name}", entries[name], name=name) for name in dict.fromkeys(only) or entries
    )
    rest = {key: value for key, value in values.items() if key != "machines"}
    return _build(PriceList, str(path), rest, path=path, machines=machines)


def _build(kind: Any, where: str, values: Any, **given: Any) -> Any:
    """Return an attrs class from JSON. Raises BadInput."""
    if not isinstance(values, dict):
        raise BadInput(f"{where}: got {quoted(values)}, wanted an object of keys and values")
    fields = attrs.fields_dict(kind)
    known = [key for key in fields if key not in given]
    for key in values:
        if key not in known:
            raise BadInput(f"{where}: unknown key '{key}'{nearest(key, known)}")
    for key in known:
        if key not in values and fields[key].default is attrs.NOTHING:
            raise BadInput(f"{where}: key '{key}' is missing; wanted what {MACHINES} has")
    try:
        return kind(**values, **given)
    except ValueError as error:  # our validators': "KEY: got ..., wanted ..."
        raise BadInput(f"{where}: {error}") from error


def _check_date(value: Any) -> None:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"date: got {quoted(value)}, wanted the day of the prices, as in 2025-12-06") from error


def _check_gpu(name: Any) -> None:
    if not isinstance(name, str) or name not in GPU_GIB:
        raise ValueError(f"gpu: got {quoted(name)}{nearest(str(name), GPU_GIB)}")
