"""Tensor files of a checkpoint: weights and optimizer moments as safetensors, written and read in shards.

The bytes of both files depend only on the state: they contain complete tensors, ordered by name, without vocabulary
padding. Under FSDP, a rank has consecutive rows of every tensor. Each rank writes its rows at their offset in the file,
so that nothing is gathered. Under DDP, where every rank has all rows, a rank writes the rows that FSDP would give it.
Tensors that are split into tensor shards are gathered one at a time and written as under DDP. If several nodes share a
disk, only the first node writes, and rows that only the other nodes have are sent to it.
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

HEADER_ALIGNMENT = 8  # in bytes; the safetensors format requires it
SENT_BYTES = 16 << 20  # size of one message to the node that writes
STORED_DTYPES = {  # names of types in the safetensors format
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@attrs.frozen
class StoredTensor:
    """A tensor in a file, and the parameter or moment that it stores."""

    key: str  # name in the file
    value: Placed  # on the device, possibly sharded, with vocabulary padding
    rows: int  # size of the first dimension, without padding
    row_bytes: int

    @property
    def shape(self) -> list[int]:
        return [self.rows, *self.value.shape[1:]]


class StateShard:
    """This rank's shard of the state, which is copied to the CPU and then written in the background."""

    def __init__(self, state: TrainState, ranks: Ranks, disk: RankGroup):
        """Plan which rank writes which rows. Call it on every rank.

        `disk`: the ranks that use the same run directory as this one. Only the first node of a disk writes to it,
        because clients of a network file system write complete pages: a second client would overwrite bytes of the
        first one with its outdated copy of a page.
        """
        self.state, self.ranks, self.disk = state, ranks, disk
        self._pinned = ranks.device.type == "cuda"
        self._writes = disk.rank == ranks.node.rank
        writes = gather(ranks, self._writes)
        writers = [rank for rank in members(ranks, disk) if writes[rank]]
        # If every writer has a complete tensor, the writers divide its rows among themselves.
        self._dividers = RankGroup(rank=disk.rank if self._writes else 0, size=len(writers))
        # Whether this rank's rows of sharded tensors are written. If not, a replica writes the same rows.
        self._gives_shard = disk.size == ranks.node.size or state.parallel.levels.across.rank == 0
        self._headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}  # file -> its complete size in bytes
        for file, tensors in _files(state):
            self._headers[file] = header = _header(tensors)
            self.sizes[file] = len(header) + sum(stored.rows * stored.row_bytes for stored in tensors)
        self._staged = [
            (file, offset_bytes, torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._pinned))
            for file, offset_bytes, rows in self._local_rows(shapes=True)
        ]
        sent = [(file, offset_bytes, staged.nbytes) for file, offset_bytes, staged in self._staged]
        rows_sent = gather(ranks, [] if self._writes else sent)
        senders = [rank for rank in members(ranks, disk) if rows_sent[rank]]
        writer_of = {sender: writers[number % len(writers)] for number, sender in enumerate(senders)}
        # The rank to which this one sends its rows. None: this rank writes, or it has nothing to write.
        self._writer = writer_of.get(ranks.rank)
        self._received = {sender: rows_sent[sender] for sender, writer in writer_of.items() if writer == ranks.rank}

    def stage(self) -> None:
        """Copy this rank's rows from the device to the CPU, with their current values."""
        for (_, _, staged), (_, _, rows) in zip(self._staged, self._local_rows(), strict=True):
            staged.copy_(rows, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def write(self, checkpoint: Path, group: Any) -> dict[str, list[WrittenBytes]]:
        """Write the staged rows durably, or send them to the node that writes. Return the digests for each file."""
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
            for _ in rows:  # after a failure, receive the remaining rows, because the other nodes send all of them
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
        """Yield (offset in bytes, content) of the rows that other nodes send. Each item overwrites the previous one."""
        buffer = torch.empty(SENT_BYTES if self._received else 0, dtype=torch.uint8)
        for rank, sent in self._received.items():
            for offset_bytes, size_bytes in ((offset, size) for name, offset, size in sent if name == file):
                for start in range(0, size_bytes, SENT_BYTES):
                    part = buffer[: min(SENT_BYTES, size_bytes - start)]
                    dist.recv(part, rank, group=group)
                    yield offset_bytes + start, memoryview(part.numpy().data)

    def _local_rows(self, *, shapes: bool = False) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (file, offset in bytes, rows on the device) for the part of each tensor that this rank writes or sends.

        `shapes`: the caller needs only the shapes of the rows, so nothing is gathered.
        """
        for file, tensors in _files(self.state):
            offset_bytes = len(self._headers[file])
            for stored in tensors:
                tensor = stored.value
                if shapes and isinstance(tensor, Sharded):  # `checkpoint_rows` would gather it
                    tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                first, rows = checkpoint_rows(tensor, self._dividers, replica=self._writes, shard=self._gives_shard)
                rows = rows[: max(0, stored.rows - first)]
                if len(rows):
                    yield file, offset_bytes + first * stored.row_bytes, rows
                offset_bytes += stored.rows * stored.row_bytes


def state_sha256(state: TrainState, ranks: Ranks) -> str | None:
    """On rank 0, return the `state_sha256` that a checkpoint of this state would have; on other ranks, return None.

    Call it on every rank.
    """
    digests = {}
    for file, tensors in _files(state):
        digest = hashlib.sha256(_header(tensors))
        for stored in tensors:
            full = full_tensor(stored.value)  # a collective under FSDP, so every rank calls it
            if ranks.coordinates:
                digest.update(_bytes_of(full[: stored.rows].to("cpu").contiguous()))
        digests[file] = digest.hexdigest()
    return combined_sha256(state.position.step, digests) if ranks.coordinates else None


def load(checkpoint: Path, state: TrainState) -> None:
    """Load a checkpoint. Every rank reads only the rows that it holds.

    Raises BadInput if the checkpoint is missing or belongs to another model.
    """
    saved = read_state(checkpoint)
    with torch.no_grad():
        for name, tensors in _files(state):
            file = checkpoint / name
            unreadable = refusing(f"{file}: cannot be read", kinds=(OSError, SafetensorError))
            with unreadable, safe_open(file, framework="pt") as opened:
                _check_tensors(file, opened, tensors)
                for stored in tensors:
                    for rows, columns, local_part in held_pieces(stored.value):
                        count = max(0, min(len(local_part), stored.rows - rows.start))
                        local_part[count:].zero_()  # padding rows beyond the vocabulary
                        if count:
                            local_part[:count].copy_(within(opened.get_slice(stored.key), rows[:count], columns))
    state.optimizer.steps = saved.optimizer_steps
    state.loss_scale.load(saved.loss_scale, saved.config.numerics.get("precision"))
    state.position = saved.position


def _check_tensors(path: Path, opened: Any, tensors: list[StoredTensor]) -> None:
    """Raise BadInput unless a file contains exactly these tensors, with their shapes and types."""
    tensors_by_key = {stored.key: stored for stored in tensors}
    if differences := sorted(set(opened.keys()) ^ tensors_by_key.keys()):
        raise BadInput(f"{path}: parameters differ from model.json; the first difference is {differences[0]}")
    for key, stored in tensors_by_key.items():
        tensor, dtype = opened.get_slice(key), STORED_DTYPES[stored.value.dtype]
        if tensor.get_shape() != stored.shape or tensor.get_dtype() != dtype:
            got = f"{tensor.get_dtype()} {tensor.get_shape()}"
            raise BadInput(f"{path}: {key}: got {got}, wanted {dtype} {stored.shape}")


def _files(state: TrainState) -> Iterator[tuple[str, list[StoredTensor]]]:
    parameters = state.parallel.by_plain_name(state.parallel.named_parameters())
    config = state.parallel.network.config

    def stored(key: str, name: str, tensor: Placed) -> StoredTensor:
        # The size is calculated from the shape: slicing a row from a DTensor would gather the complete tensor.
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        return StoredTensor(key, tensor, stored_rows(name, tensor.shape[0], config), row_bytes)

    yield WEIGHTS, [stored(name, name, parameters[name]) for name in sorted(parameters)]
    optimizer_states = state.optimizer.state_tensors.items()
    kinds = {kind: state.parallel.by_plain_name(tensors) for kind, tensors in optimizer_states}
    yield (
        OPTIMIZER,
        [stored(f"{kind}.{name}", name, tensors[name]) for kind, tensors in kinds.items() for name in sorted(tensors)],
    )


def _header(tensors: list[StoredTensor]) -> bytes:
    """Return the beginning of a safetensors file that contains these tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires this entry
    end = 0
    for stored in tensors:
        offset, end = end, end + stored.rows * stored.row_bytes
        dtype = STORED_DTYPES[stored.value.dtype]
        entries[stored.key] = {"dtype": dtype, "shape": stored.shape, "data_offsets": [offset, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(rows: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any type."""
    return memoryview(rows.view(torch.uint8).numpy().data).cast("B")
