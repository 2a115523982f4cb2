"""The table of GPUs in gpus.json: memory, peak FLOP/s and bandwidth. Users add rows in a price list (--machines).

`memory_gib` is the smallest "total capacity" that published out-of-memory messages of torch report for a card. For
A10G, A40, A6000, B200, GB200, H100, H200, L4, RTX 3090 Ti and 5090, it is an assumption. Peaks and bandwidths are from
the vendors' datasheets.
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
ROW = {"memory_gib": 0, "bf16_tflops": 0, "gb_per_second": 0}  # an empty row, which errors show as a template
_SIZE = checks.number(0.0, 1e6, above=True)


@attrs.frozen(kw_only=True)
class Gpu:
    """A type of GPU: a row of gpus.json, or of a price list."""

    name: str = attrs.field(validator=checks.text())
    memory_gib: float = attrs.field(validator=_SIZE)  # memory of one GPU that torch can use
    bf16_tflops: float = attrs.field(validator=_SIZE)  # dense peak, without sparsity
    gb_per_second: float = attrs.field(validator=_SIZE)  # memory bandwidth in units of 1e9 bytes
    # The name that torch uses for the GPU, or consecutive words of that name
    torch_name: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    # The roofline uses the fractions that were fitted to this GPU: FITS in training/planning/throughput.py.
    similar_to: str = attrs.field(default="a100", validator=checks.one_of("a100", "h100"))

    @property
    def peak_flops(self) -> float:
        """The dense bf16 peak in FLOP/s."""
        return self.bf16_tflops * 1e12


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    """Return the GPUs of gpus.json by name."""
    return read_gpus(GPUS, read_json(GPUS))


def read_gpus(path: Path, rows: Any) -> dict[str, Gpu]:
    """Return GPUs by name: those of the table, or those that a price list adds under "gpus". Raises BadInput."""
    if not isinstance(rows, dict):
        raise BadInput(f'{path}: gpus: got {quoted(rows)}, wanted {{"NAME": {json.dumps(ROW)}}}')
    return {name: read_entry(Gpu, f"{path}: {name}", row, name=name) for name, row in rows.items()}


def find_gpu(name: str, gpus: Mapping[str, Gpu], where: str = "") -> Gpu:
    """Return the GPU with this name.

    Raises BadInput if there is none. The error begins with `where`, names similar GPUs and explains how to add a GPU.
    """
    gpu = gpus.get(name) or gpus.get(name.lower())
    if gpu is not None:
        return gpu
    longer = [known_name for known_name in sorted(gpus) if name and name in known_name]
    suggestion = f"did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, gpus)
    row = json.dumps({"gpus": {name: ROW}})
    advice = f"{suggestion}; to add a GPU, write {row} with its numbers into a file, and pass that as --machines"
    raise BadInput(Problem(where=where, key=name, text=f"unknown GPU '{name}'", advice=advice))


def named_gpus(device: str) -> list[Gpu]:
    """Return the GPUs whose name matches a torch device name.

    The list is empty for a laptop's GPU and for a slice of a GPU (MIG), because both are slower than the table's
    GPU with a similar name.
    """
    if re.search(r"\b(Laptop|MIG)\b", device):
        return []
    named = [gpu for gpu in known_gpus().values() if gpu.torch_name is not None]
    matches = [gpu for gpu in named if re.search(rf"\b{re.escape(gpu.torch_name or '')}\b", device)]
    longest = max((len(gpu.torch_name or "") for gpu in matches), default=0)
    return [gpu for gpu in matches if len(gpu.torch_name or "") == longest]


def read_entry(kind: type[checks.Structured], where: str, values: Any, **fields: Any) -> checks.Structured:
    """Make an instance of an attrs class from a JSON object, as `checked` does. Raises BadInput."""
    with refusing(where):
        return checks.checked(kind, values, **fields)
