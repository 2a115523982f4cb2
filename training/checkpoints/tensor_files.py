"""Tensor files of a checkpoint: weights and optimizer moments as safetensors, written and read in shards.

The bytes of both files follow from the state alone: tensors by name, whole, without vocabulary padding, their rows one
after the other. FSDP gives a rank consecutive rows of every tensor, so each rank writes its own rows at their place and
nothing is gathered; under DDP, where every rank holds everything, it writes the rows that FSDP would give it. Tensors
in tensor shards are gathered, one after the other, and written as under DDP. Of nodes that share a disk the first one
writes: rows that only others have are sent to it.
"""

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import BadInput, refusing
from model.axes import stored_rows
from training.checkpoints.atomic_commit import WrittenBytes, write_rows
from training.checkpoints.directory import OPTIMIZER, WEIGHTS
from training.checkpoints.saved_state import combined_sha256, read_state
from training.parallel.mesh import Placed, Sharded, checkpoint_rows, full_tensor, held_pieces, within
from training.parallel.process_group import RankGroup, Ranks, gather, members
from training.state import TrainState

HEADER_ALIGNMENT = 8  # bytes; the safetensors format's
SENT_BYTES = 16 << 20  # at a time to the node that writes
STORED_DTYPES = {  # names in the safetensors format
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@attrs.frozen
class Stored:
    """A tensor of a file, and the parameter or moment behind it."""

    key: str  # in the file
    value: Placed  # on the device, maybe sharded, with vocabulary padding
    rows: int  # first dimension, without padding
    row_bytes: int

    @property
    def shape(self) -> list[int]:
        return [self.rows, *self.value.shape[1:]]


class StateShard:
    """This rank's shard of the state: staged on the CPU, written asynchronously."""

    def __init__(self, state: TrainState, ranks: Ranks, disk: RankGroup):
        """Collective: call it on every rank. `disk`: the ranks that use the same run directory as this one.

        Only the disk's first node writes to it: clients of a network file system write whole pages, and one would write
        its outdated copy of a page over the bytes that another one has put there.
        """
        self.state, self.ranks, self.disk = state, ranks, disk
        self._pinned = ranks.device.type == "cuda"
        self._writes = disk.rank == ranks.node.rank
        writes = gather(ranks, self._writes)
        writers = [rank for rank in members(ranks, disk) if writes[rank]]
        # Ranks that divide the tensors that each of them has whole
        self._dividers = RankGroup(rank=disk.rank if self._writes else 0, size=len(writers))
        # Whether this rank gives its rows of sharded tensors: replicas on another node have the same rows
        self._gives_shard = disk.size == ranks.node.size or state.parallel.levels.across.rank == 0
        self._headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}  # of whole files, of all ranks
        for file, tensors in _files(state):
            self._headers[file] = header = _header(tensors)
            self.sizes[file] = len(header) + sum(stored.rows * stored.row_bytes for stored in tensors)
        self._staged = [
            (file, offset_bytes, torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._pinned))
            for file, offset_bytes, rows in self._own_rows(shapes=True)
        ]
        sent = [(file, offset_bytes, staged.nbytes) for file, offset_bytes, staged in self._staged]
        rows_sent = gather(ranks, [] if self._writes else sent)
        senders = [rank for rank in members(ranks, disk) if rows_sent[rank]]
        writer_of = {sender: writers[number % len(writers)] for number, sender in enumerate(senders)}
        self._writer = writer_of.get(ranks.rank)  # rank that writes the rows that this one sends
        self._received = {sender: rows_sent[sender] for sender, writer in writer_of.items() if writer == ranks.rank}

    def stage(self) -> None:
        """Copy this rank's rows off the device, as they are now."""
        for (_, _, staged), (_, _, rows) in zip(self._staged, self._own_rows(), strict=True):
            staged.copy_(rows, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def write(self, checkpoint: Path, group: Any) -> dict[str, list[WrittenBytes]]:
        """Write the staged rows, durably, or send them to the node that writes; return their digests."""
        pieces: dict[str, list[WrittenBytes]] = {}
        problem: OSError | None = None
        for file, header in self._headers.items():
            staged_rows = [(offset, _bytes_of(staged)) for name, offset, staged in self._staged if name == file]
            if self.disk.rank == 0:
                staged_rows.insert(0, (0, memoryview(header)))
            pieces[file] = [WrittenBytes.of(offset_bytes, content) for offset_bytes, content in staged_rows]
            if not self._writes:
                self._send(staged_rows, group)
                continue
            rows = itertools.chain(staged_rows, self._receive(file, group))
            try:
                if problem is None:
                    write_rows(checkpoint, file, rows)
            except OSError as error:
                problem = error
            for _ in rows:  # after a failure: other nodes send until all is taken
                pass
        if problem is not None:
            raise problem
        return pieces

    def _send(self, rows: list[tuple[int, memoryview]], group: Any) -> None:
        for _, content in rows:
            for start in range(0, len(content), SENT_BYTES):
                part = torch.frombuffer(content[start : start + SENT_BYTES], dtype=torch.uint8)
                dist.send(part, self._writer, group=group)

    def _receive(self, file: str, group: Any) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in bytes, content) of the rows that other nodes send; a content is valid until the next."""
        buffer = torch.empty(SENT_BYTES if self._received else 0, dtype=torch.uint8)
        for rank, sent in self._received.items():
            for offset_bytes, size_bytes in ((offset, size) for name, offset, size in sent if name == file):
                for start in range(0, size_bytes, SENT_BYTES):
                    part = buffer[: min(SENT_BYTES, size_bytes - start)]
                    dist.recv(part, rank, group=group)
                    yield offset_bytes + start, memoryview(part.numpy().data)

    def _own_rows(self, *, shapes: bool = False) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (file, offset in bytes, rows on the device) of each tensor of which this rank gives rows."""
        for file, tensors in _files(self.state):
            offset_bytes = len(self._headers[file])
            for stored in tensors:
                value = stored.value
                if shapes and isinstance(value, Sharded):  # which is gathered to be written
                    value = torch.empty(value.shape, dtype=value.dtype, device="meta")
                first, rows = checkpoint_rows(value, self._dividers, replica=self._writes, shard=self._gives_shard)
                rows = rows[: max(0, stored.rows - first)]
                if len(rows):
                    yield file, offset_bytes + first * stored.row_bytes, rows
                offset_bytes += stored.rows * stored.row_bytes


def state_sha256(state: TrainState, ranks: Ranks) -> str | None:
    """Return the `state_sha256` that a checkpoint of this state has; None but on rank 0. Call it on every rank."""
    digests = {}
    for file, tensors in _files(state):
        digest = hashlib.sha256(_header(tensors))
        for stored in tensors:
            whole = full_tensor(stored.value)  # collective under FSDP: on every rank
            if ranks.coordinates:
                digest.update(_bytes_of(whole[: stored.rows].to("cpu").contiguous()))
        digests[file] = digest.hexdigest()
    return combined_sha256(state.position.step, digests) if ranks.coordinates else None


def load(checkpoint: Path, state: TrainState) -> None:
    """Load a checkpoint, on every rank the rows it holds. Raises BadInput for a missing one, or another model's."""
    saved = read_state(checkpoint)
    with torch.no_grad():
        for name, tensors in _files(state):
            file = checkpoint / name
            unreadable = refusing(f"{file}: cannot be read", kinds=(OSError, SafetensorError))
            with unreadable, safe_open(file, framework="pt") as opened:
                _check_tensors(file, opened, tensors)
                for stored in tensors:
                    for rows, columns, held in held_pieces(stored.value):
                        count = max(0, min(len(held), stored.rows - rows.start))
                        held[count:].zero_()  # rows beyond the vocabulary
                        if count:
                            held[:count].copy_(within(opened.get_slice(stored.key), rows[:count], columns))
    state.optimizer.steps = saved.optimizer_steps
    state.loss_scale.load(saved.loss_scale, saved.config.numerics.get("precision"))
    state.position = saved.position


def _check_tensors(path: Path, opened: Any, tensors: list[Stored]) -> None:
    """Raise BadInput unless a file holds these tensors, of these shapes and types, and no others."""
    wanted = {stored.key: stored for stored in tensors}
    if unlike := sorted(set(opened.keys()) ^ wanted.keys()):
        raise BadInput(f"{path}: parameters differ from model.json, the first is {unlike[0]}")
    for key, stored in wanted.items():
        found, dtype = opened.get_slice(key), STORED_DTYPES[stored.value.dtype]
        if found.get_shape() != stored.shape or found.get_dtype() != dtype:
            raise BadInput(f"{path}: {key}: got {found.get_dtype()} {found.get_shape()}, wanted {dtype} {stored.shape}")


def _files(state: TrainState) -> Iterator[tuple[str, list[Stored]]]:
    parameters = state.parallel.by_plain_name(state.parallel.named_parameters())
    config = state.parallel.network.config

    def stored(key: str, name: str, value: Placed) -> Stored:
        row_bytes = math.prod(value.shape[1:]) * value.dtype.itemsize  # by shape: a slice of a DTensor gathers it
        return Stored(key, value, stored_rows(name, value.shape[0], config), row_bytes)

    yield WEIGHTS, [stored(name, name, parameters[name]) for name in sorted(parameters)]
    states = state.optimizer.state_tensors.items()
    kinds = {kind: state.parallel.by_plain_name(own) for kind, own in states}
    yield OPTIMIZER, [stored(f"{kind}.{name}", name, own[name]) for kind, own in kinds.items() for name in sorted(own)]


def _header(tensors: list[Stored]) -> bytes:
    """Return the beginning of a safetensors file that holds these tensors in this order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers wants to see
    end = 0
    for stored in tensors:
        offset, end = end, end + stored.rows * stored.row_bytes
        dtype = STORED_DTYPES[stored.value.dtype]
        described[stored.key] = {"dtype": dtype, "shape": stored.shape, "data_offsets": [offset, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(rows: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any type."""
    return memoryview(rows.view(torch.uint8).numpy().data).cast("B")
