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

from common import checks
from common.errors import BadInput, Problem, refusing
from common.json_files import read_json
from common.text import nearest, quoted

GPUS = Path(__file__).with_name("gpus.json")
ROW = {"memory_gib": 0, "bf16_tflops": 0, "gb_per_second": 0}  # of a new GPU, to be filled in
_SIZE = checks.number(0.0, 1e6, above=True)


@attrs.frozen(kw_only=True)
class Gpu:
    name: str = attrs.field(validator=checks.text())
    memory_gib: float = attrs.field(validator=_SIZE)  # usable by torch, of one GPU
    bf16_tflops: float = attrs.field(validator=_SIZE)  # dense peak, without sparsity
    gb_per_second: float = attrs.field(validator=_SIZE)  # memory bandwidth, 1e9 bytes
    torch_name: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))  # or words of it
    similar_to: str = attrs.field(default="a100", validator=checks.one_of("a100", "h100"))  # for the roofline

    @property
    def peak_flops(self) -> float:
        """Dense bf16 peak in FLOP/s."""
        return self.bf16_tflops * 1e12


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    return read_gpus(GPUS, read_json(GPUS))


def read_gpus(path: Path, rows: Any) -> dict[str, Gpu]:
    """Return rows of the table, or those that a price list adds under "gpus", by name. Raises BadInput."""
    if not isinstance(rows, dict):
        raise BadInput(f'{path}: gpus: got {quoted(rows)}, wanted {{"NAME": {json.dumps(ROW)}}}')
    return {name: read_entry(Gpu, f"{path}: {name}", row, name=name) for name, row in rows.items()}


def find_gpu(name: str, gpus: Mapping[str, Gpu], where: str = "") -> Gpu:
    """Return a GPU by its name. Raises BadInput with the nearest names and how to add one, after `where`."""
    found = gpus.get(name) or gpus.get(name.lower())
    if found is not None:
        return found
    longer = [known for known in sorted(gpus) if name and name in known]
    meant = f"did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, gpus)
    row = json.dumps({"gpus": {name: ROW}})
    advice = f"{meant}; to add a GPU, write {row}, with its numbers, into the file given by --machines"
    raise BadInput(Problem(where=where, key=name, text=f"unknown GPU '{name}'", advice=advice))


def named_gpus(device: str) -> list[Gpu]:
    """Return the GPUs that a torch device name fits; none for a laptop's, or a slice (MIG), which are slower."""
    if re.search(r"\b(Laptop|MIG)\b", device):
        return []
    named = [gpu for gpu in known_gpus().values() if gpu.torch_name is not None]
    fitting = [gpu for gpu in named if re.search(rf"\b{re.escape(gpu.torch_name or '')}\b", device)]
    longest = max((len(gpu.torch_name or "") for gpu in fitting), default=0)
    return [gpu for gpu in fitting if len(gpu.torch_name or "") == longest]


def read_entry(kind: type[checks.Structured], where: str, values: Any, **given: Any) -> checks.Structured:
    """Return an attrs class from a JSON object, as `checked`. Raises BadInput."""
    with refusing(where):
        return checks.checked(kind, values, **given)
