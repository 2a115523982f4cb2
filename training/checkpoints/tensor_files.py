"""The two tensor files of a checkpoint: which of their bytes this rank holds, and how it writes and reads them.

The bytes of both files follow from the state alone: tensors by name, whole, without vocabulary padding, their rows one
after the other. FSDP gives a rank consecutive rows of every tensor, so each rank writes its own rows at their place and
nothing is gathered; under DDP, where every rank holds everything, it writes the rows that FSDP would give it.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import BadInput
from model.pretrained import stored_rows
from training.parallel.process_group import Ranks
from training.parallel.wrap import full_tensor, held_rows, rows_of
from training.state import TrainState

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
HEADER_ALIGNMENT = 8  # bytes; the safetensors format's


@attrs.frozen
class Stored:
    """A tensor of a file: the one it is taken from, and what of it is stored."""

    key: str  # in the file
    value: Tensor  # in use: on the device, sharded under FSDP, padded
    rows: int  # that are stored, of the first dimension
    row_bytes: int


@attrs.frozen
class RowRange:
    """Consecutive rows of one tensor that this rank writes."""

    file: str
    offset_bytes: int  # from the beginning of the file
    copy: Tensor  # (rows, ...) on the CPU, pinned beside a GPU


class Share:
    """This rank's part of the state: copied off the device in one go, written at leisure."""

    def __init__(self, state: TrainState, ranks: Ranks):
        self._state, self._ranks = state, ranks
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}  # bytes of a whole file
        self._extents: list[RowRange] = []
        for file, tensors in _files(state):
            header, offset = _header(tensors), 0
            for stored in tensors:
                first, rows = _own_rows(stored, ranks)
                if len(rows):
                    place = len(header) + offset + first * stored.row_bytes
                    pinned = ranks.device.type == "cuda"
                    copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned)
                    self._extents.append(RowRange(file, place, copy))
                offset += stored.rows * stored.row_bytes
            self.headers[file], self.sizes[file] = header, len(header) + offset

    def copy(self) -> None:
        """Copy this rank's rows off the device, as they are now."""
        extents = iter(self._extents)
        for _, tensors in _files(self._state):
            for stored in tensors:
                _, rows = _own_rows(stored, self._ranks)
                if len(rows):
                    next(extents).copy.copy_(rows, non_blocking=True)
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def write(self, directory: Path) -> None:
        """Write the copied rows into the files, which have their full size, and wait until they are on the disk."""
        for file in self.headers:
            descriptor = os.open(directory / file, os.O_WRONLY)
            try:
                for extent in self._extents:
                    if extent.file == file:
                        _write_at(descriptor, extent.copy, extent.offset_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def combined_sha256(step: int, files: dict[str, str]) -> str:
    """Return `state_sha256`: of "STEP DIGEST DIGEST", the sha256 of the weights' and of the optimizer's file."""
    return hashlib.sha256(f"{step} {files[WEIGHTS]} {files[OPTIMIZER]}".encode()).hexdigest()


def state_sha256(state: TrainState, ranks: Ranks) -> str | None:
    """Return the `state_sha256` that a checkpoint of this state has; None but on rank 0. Call it on every rank."""
    digests = {}
    for file, tensors in _files(state):
        digest = hashlib.sha256(_header(tensors))
        for stored in tensors:
            whole = full_tensor(stored.value)  # collective under FSDP: on every rank
            if ranks.coordinates:
                digest.update(whole[: stored.rows].to("cpu").contiguous().numpy().data)
        digests[file] = digest.hexdigest()
    return combined_sha256(state.position.step, digests) if ranks.coordinates else None


def read_state_files(directory: Path, state: TrainState, optimizer_steps: int) -> None:
    """Put weights and moments in place, each rank the rows it holds. Raises BadInput for another model's."""
    with torch.no_grad():
        for file, tensors in _files(state):
            try:
                with safe_open(directory / file, framework="pt") as opened:
                    _check_tensors(directory / file, opened, tensors)
                    for stored in tensors:
                        _read_rows(opened, stored)
            except (OSError, SafetensorError) as error:
                raise BadInput(f"{directory / file}: cannot be read: {error}") from error
    state.optimizer.steps = optimizer_steps


def _check_tensors(path: Path, opened: Any, tensors: list[Stored]) -> None:
    """Raise BadInput unless a file holds these tensors, of these shapes, in fp32, and no others."""
    wanted = {stored.key: [stored.rows, *stored.value.shape[1:]] for stored in tensors}
    if unlike := sorted(set(opened.keys()) ^ wanted.keys()):
        raise BadInput(f"{path}: parameters differ from model.json, the first is {unlike[0]}")
    for key, shape in wanted.items():
        found = opened.get_slice(key)
        if found.get_shape() != shape or found.get_dtype() != "F32":
            raise BadInput(f"{path}: {key}: got {found.get_dtype()} {found.get_shape()}, wanted F32 {shape}")


def _files(state: TrainState) -> Iterator[tuple[str, list[Stored]]]:
    """Yield (file, its tensors in the file's order)."""
    parameters = state.parallel.named_parameters()
    config = state.parallel.network.config

    def stored(key: str, name: str, value: Tensor) -> Stored:
        row_bytes = math.prod(value.shape[1:]) * value.element_size()  # by shape: a slice of a DTensor gathers it
        return Stored(key, value.detach(), stored_rows(name, value.shape[0], config), row_bytes)

    yield WEIGHTS, [stored(name, name, parameters[name]) for name in sorted(parameters)]
    moments = [
        stored(f"{moment}.{name}", name, values[name])
        for moment, values in state.optimizer.moments.items()
        for name in sorted(values)
    ]
    yield OPTIMIZER, moments


def _own_rows(stored: Stored, ranks: Ranks) -> tuple[int, Tensor]:
    """Return the rows that this rank writes, and the first one's place in the whole tensor."""
    first, rows = rows_of(stored.value, ranks)
    return first, rows[: max(0, stored.rows - first)]


def _header(tensors: list[Stored]) -> bytes:
    """Return the beginning of a safetensors file that holds these tensors in this order, fp32."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers wants to see
    offset = 0
    for stored in tensors:
        assert stored.value.dtype == torch.float32, stored.value.dtype
        end = offset + stored.rows * stored.row_bytes
        shape = [stored.rows, *stored.value.shape[1:]]
        described[stored.key] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_at(descriptor: int, rows: Tensor, offset_bytes: int) -> None:
    data = memoryview(rows.numpy().data).cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset_bytes)  # at most 2 GiB at once on Linux
        data, offset_bytes = data[written:], offset_bytes + written


def _read_rows(file: Any, stored: Stored) -> None:
    """Read into a parameter or moment the rows that this rank holds; rows beyond the vocabulary are zero."""
    first, held = held_rows(stored.value)
    count = max(0, min(len(held), stored.rows - first))
    held[count:].zero_()
    if count:
        held[:count].copy_(file.get_slice(stored.key)[first : first + count])
