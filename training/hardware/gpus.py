"""Table of GPUs, gpus.json: memory, peak FLOP/s, bandwidth. Users add rows in a price list (--machines).

`memory_gib` is the least "total capacity" that published out-of-memory messages of torch name for a card; assumed for
A10G, A40, A6000, B200, GB200, H100, H200, L4, RTX 3090 Ti and 5090. Peaks and bandwidths: the vendors' datasheets.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, nearest, quoted
from common.json_files import read_json
from model import checks

GPUS = Path(__file__).with_name("gpus.json")
SPEEDS = ("bf16_tflops", "gb_per_second")  # needed by --plan; --predict needs memory alone
_SPEED = checks.optional(checks.number(0.0, 1e6, above=True))
EXAMPLE = {"memory_gib": 31.3, "bf16_tflops": 209.5, "gb_per_second": 1792}


@attrs.frozen(kw_only=True)
class Gpu:
    """One row of the table."""

    name: str = attrs.field(validator=checks.text())
    memory_gib: float = attrs.field(validator=checks.number(0.0, 1e6, above=True))  # usable by torch, of one GPU
    bf16_tflops: float | None = attrs.field(default=None, validator=_SPEED)  # dense peak, without sparsity
    gb_per_second: float | None = attrs.field(default=None, validator=_SPEED)  # memory bandwidth, 1e9 bytes
    torch_name: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))  # or words of it
    similar_to: str = attrs.field(default="a100", validator=checks.one_of("a100", "h100"))  # for the roofline

    @property
    def peak_flops(self) -> float:
        """Dense bf16 peak in FLOP/s, of a GPU whose row has it."""
        assert self.bf16_tflops is not None, "price lists are checked"
        return self.bf16_tflops * 1e12

    @property
    def bytes_per_second(self) -> float:
        """Memory bandwidth, of a GPU whose row has it."""
        assert self.gb_per_second is not None, "price lists are checked"
        return self.gb_per_second * 1e9


def known_gpus() -> dict[str, Gpu]:
    """Return the table by name."""
    return dict(_table())


def read_gpus(path: Path, values: Mapping[str, Any]) -> dict[str, Gpu]:
    """Return the table with the rows that a price list, already read, adds under "gpus". Raises BadInput."""
    rows = values.get("gpus", {})
    if not isinstance(rows, dict):
        raise BadInput(f'{path}: gpus: got {quoted(rows)}, wanted {{"NAME": {json.dumps(EXAMPLE)}}}')
    return known_gpus() | {name: read_entry(Gpu, f"{path}: {name}", row, name=name) for name, row in rows.items()}


def find_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu:
    """Return a GPU by its name. Raises BadInput with the nearest names and how to add one."""
    found = gpus.get(name) or gpus.get(name.lower())
    if found is not None:
        return found
    longer = [known for known in sorted(gpus) if name and name in known]
    meant = f"; did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, gpus)
    meant += "" if meant.endswith("?") else "."
    row = json.dumps({"gpus": {name: EXAMPLE}})
    raise BadInput(
        f"unknown GPU '{name}'{meant} To add a GPU, write {row}, with its numbers, into the file given by --machines"
    )


def named_gpus(device: str) -> list[Gpu]:
    """Return the GPUs that a torch device name fits, such as one with 40 and one with 80 GB; [] for an unknown one."""
    if "Laptop" in device:
        return []
    words = {gpu.torch_name for gpu in _table().values() if gpu.torch_name is not None}
    fitting = [word for word in words if re.search(rf"\b{re.escape(word)}\b", device)]
    return [gpu for gpu in _table().values() if gpu.torch_name == max(fitting, key=len, default="")]


def read_entry(kind: Any, where: str, values: Any, **given: Any) -> Any:
    """Return an attrs class from a JSON object. Raises BadInput."""
    if not isinstance(values, dict):
        raise BadInput(f"{where}: got {quoted(values)}, wanted an object of keys and values")
    fields = attrs.fields_dict(kind)
    known = [key for key in fields if key not in given]
    for key in values:
        if key not in known:
            raise BadInput(f"{where}: unknown key '{key}'{nearest(key, known)}")
    required = [key for key in known if fields[key].default is attrs.NOTHING]
    for key in required:
        if key not in values:
            raise BadInput(f"{where}: key '{key}' is missing; wanted {', '.join(required)}")
    try:
        return kind(**values, **given)
    except ValueError as error:  # our validators': "KEY: got ..., wanted ..."
        raise BadInput(f"{where}: {error}") from error


@functools.cache
def _table() -> dict[str, Gpu]:
    return {name: read_entry(Gpu, f"{GPUS}: {name}", row, name=name) for name, row in read_json(GPUS).items()}
