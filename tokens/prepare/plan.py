"""Which work there is: units of some megabytes each, a function of the inputs and settings alone.

Never of the number of workers, so that whoever computes a unit, and whenever, it holds the same tokens. The plan is
kept beside the tokens; a command goes on with it or is refused.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, quoted
from common.files import replace_file
from common.json_files import parse_json, read_regular
from tokens.documents.extent import Extent
from tokens.documents.parquet import check_column, group_bytes, open_parquet
from tokens.documents.sources import COMPRESSED_SUFFIXES, Damaged, Input, Source, look_up, readable

PLAN = "plan.json"
FORMAT = 1
MOST_BYTES = 1 << 40  # of a plan: it names each input


@attrs.frozen(kw_only=True)
class PrepareSettings:
    """What, beside the inputs, decides the bytes that are written."""

    text_field: str
    tokenizer: str  # as it was named on the command line
    fingerprint: str  # of what the tokenizer does: tokens.tokenizer.fingerprint
    vocabulary_size: int
    end_of_text_id: int
    split: str  # "hash" or "tail"
    split_seed: int
    validation_fraction: float
    test_fraction: float
    unit_bytes: int
    shard_tokens: int | None = None  # of each file but the last


@attrs.frozen
class UnitPlan:
    """All units, in the order of their tokens."""

    settings: PrepareSettings
    sources: tuple[Source, ...]
    units: tuple[tuple[Extent, ...], ...]
    unit_bytes: tuple[int, ...]  # of input, about

    @property
    def inputs(self) -> tuple[Input, ...]:
        return tuple(item for source in self.sources for item in source.inputs)

    def fingerprint(self) -> str:
        """Return a sha256 of everything in the plan."""
        return hashlib.sha256(json.dumps(attrs.asdict(self)).encode()).hexdigest()


def make_plan(sources: list[Source], settings: PrepareSettings) -> UnitPlan:
    """Cut the inputs into units of about `settings.unit_bytes`. Raises BadInput for inputs that cannot be read."""
    inputs = [item for source in sources for item in source.inputs]
    units: list[tuple[Extent, ...]] = []
    sizes: list[int] = []
    unit: list[Extent] = []
    size = 0
    with ThreadPoolExecutor(16) as threads:  # the footers of remote Parquet files are slow to come
        for atoms in threads.map(lambda number: list(_atoms(number, inputs[number], settings)), range(len(inputs))):
            for extent, extent_bytes in atoms:
                if unit and size + extent_bytes > settings.unit_bytes:
                    units.append(tuple(unit))
                    sizes.append(size)
                    unit, size = [], 0
                if unit and unit[-1].input == extent.input and unit[-1].end == extent.begin:
                    unit[-1] = attrs.evolve(unit[-1], end=extent.end)
                else:
                    unit.append(extent)
                size += extent_bytes
    if unit:
        units.append(tuple(unit))
        sizes.append(size)
    return UnitPlan(settings, tuple(sources), tuple(units), tuple(sizes))


def write_plan(directory: Path, plan: UnitPlan) -> None:
    """Keep the plan beside the tokens that it describes."""
    text = json.dumps({"format": FORMAT, "fingerprint": plan.fingerprint(), **attrs.asdict(plan)})
    replace_file(directory / PLAN, text, durable=True)


def read_plan(directory: Path) -> UnitPlan | None:
    """Return the plan of a token directory, or None. Raises BadInput for a damaged one."""
    path = directory / PLAN
    try:
        values = parse_json(read_regular(path, MOST_BYTES))
        plan = _from_json(values)
        wanted = str(values["fingerprint"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: damaged: {quoted(error)}; begin anew in another --output") from error
    if plan.fingerprint() != wanted:
        raise BadInput(f"{path}: damaged: its fingerprint is not {wanted[:12]}...; begin anew in another --output")
    return plan


def check_same(directory: Path, kept: UnitPlan, wanted: PrepareSettings, sources: list[Source]) -> None:
    """Raise BadInput naming the first thing in which a command differs from the plan that it would go on with."""
    where = f"{directory / PLAN}: another command began these tokens"
    advice = "repeat that command, or pass another --output"
    for field in attrs.fields(PrepareSettings):
        got, was = getattr(wanted, field.name), getattr(kept.settings, field.name)
        if got != was:
            raise BadInput(f"{where}: {field.name}: got {got}, wanted {was}; {advice}")
    was_inputs = {item.path: item for item in kept.inputs}
    now_inputs = {item.path: item for source in sources for item in source.inputs}
    for path, item in was_inputs.items():
        if path not in now_inputs:
            look_up(path)  # raises when the file is gone
            raise BadInput(f"{where}: {path} is not among the sources any more; {advice}")
        item.compare(now_inputs[path])
    for path in now_inputs:
        if path not in was_inputs:
            raise BadInput(f"{where}: {path} was not among the sources; {advice}")
    # Names may differ: of the same files, seen from another folder.
    now, was = ([[item.path for item in source.inputs] for source in listed] for listed in (sources, kept.sources))
    if now != was:
        raise BadInput(f"{where}: the sources were named otherwise, or in another order; {advice}")


def _atoms(number: int, item: Input, settings: PrepareSettings) -> Iterator[tuple[Extent, int]]:
    """Yield the parts of one input that units are made of, with their sizes in bytes."""
    if item.path.endswith(".parquet"):
        yield from _row_groups(number, item, settings)
    elif item.path.endswith(COMPRESSED_SUFFIXES):
        yield Extent(number, 0, item.size_bytes), item.size_bytes
    else:
        count = max(1, round(item.size_bytes / settings.unit_bytes))
        edges = [item.size_bytes * part // count for part in range(count + 1)]
        for begin, end in itertools.pairwise(edges):
            yield Extent(number, begin, end), end - begin


def _row_groups(number: int, item: Input, settings: PrepareSettings) -> Iterator[tuple[Extent, int]]:
    with item.open() as stream, readable(item.path):
        try:
            table = open_parquet(stream)
        except Damaged:
            table = None
        if table is None or table.metadata.num_rows == 0:
            yield Extent(number, 0, 0), item.size_bytes  # its unit says that it is damaged, or empty
            return
        check_column(table, settings.text_field, item.path)
        for group in range(table.metadata.num_row_groups):
            yield Extent(number, group, group + 1), group_bytes(table, group, settings.text_field)


def _from_json(values: dict[str, Any]) -> UnitPlan:
    return UnitPlan(
        PrepareSettings(**values["settings"]),
        tuple(
            Source(source["name"], tuple(Input(**item) for item in source["inputs"])) for source in values["sources"]
        ),
        tuple(tuple(Extent(**extent) for extent in unit) for unit in values["units"]),
        tuple(values["unit_bytes"]),
    )
