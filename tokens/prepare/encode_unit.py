"""One unit of work: read, encode and write its tokens. Runs in any process on any machine that sees the same files.

No tokens pass between processes: a unit's go to files of its own, and a few numbers about them come back.
"""

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs.validators import deep_iterable, deep_mapping, in_, instance_of

from common.errors import BadInput
from tokens.documents.extent import Extent
from tokens.documents.reader import Piece, Reader
from tokens.documents.sources import Input
from tokens.format.splits import SPLITS, SplitRule
from tokens.tokenizer.fast_encoder import FastBytePairEncoder, Recipe, encoders
from tokens.tokenizer.tokenizer import Encoder, fingerprint, token_dtype

BATCH_CHARACTERS = 1 << 19  # of text encoded at a time


@attrs.frozen(kw_only=True)
class EncodeJob:
    """What is the same for all units."""

    directory: Path  # of the units' files
    text_field: str
    tokenizer: str
    fingerprint: str  # of what the tokenizer must do, on any machine
    recipe: Recipe | None  # for the fast encoder
    rule: SplitRule


@attrs.frozen(kw_only=True)
class Task:
    """One unit, and the inputs that its extents number."""

    index: int
    extents: tuple[Extent, ...]  # numbered as below
    inputs: tuple[Input, ...]


@attrs.frozen(kw_only=True)
class UnitPart:
    """What a unit has written for one split."""

    tokens: int = attrs.field(validator=instance_of(int))
    documents: int = attrs.field(validator=instance_of(int))  # that end here
    max_id: int = attrs.field(validator=instance_of(int))
    digest: str = attrs.field(validator=instance_of(str))  # xxh3_128 of the bytes, in hexadecimal


@attrs.frozen(kw_only=True)
class Result:
    """What is known about a finished unit."""

    index: int = attrs.field(validator=instance_of(int))
    parts: dict[str, UnitPart] = attrs.field(validator=deep_mapping(in_(SPLITS)))  # without splits that got nothing
    text_bytes: int = attrs.field(validator=instance_of(int))  # of documents, in UTF-8
    fast: bool  # computed by the fast encoder
    problems: dict[str, int] = attrs.field(validator=deep_mapping(None, instance_of(int)))  # how often, by kind
    lost_documents: int = attrs.field(validator=instance_of(int))
    lost_bytes: int = attrs.field(validator=instance_of(int))  # of input
    # The first ones, by kind; kinds that lost something come first.
    examples: dict[str, list[str]] = attrs.field(
        validator=deep_mapping(None, deep_iterable(instance_of(str), instance_of(list)))
    )


def run_unit(job: EncodeJob, task: Task) -> Result:
    """Write the tokens of a unit into `unit_file`s; return what they are. Repeating it writes the same bytes.

    Raises BadInput for an input that is gone, has changed or cannot be encoded, OSError when the disk is full.
    """
    encoder = _encoder(job.tokenizer, job.fingerprint, job.recipe)
    reader = Reader(task.inputs, job.text_field)
    writers = {split: _PartWriter(job, task.index, split, encoder) for split in SPLITS}
    text_bytes = 0
    try:
        for batch in _batches(reader.read(task.extents)):
            with _naming_inputs(task):
                text_bytes += _encode(batch, encoder, job.rule, writers)
        parts = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    return Result(
        index=task.index,
        parts={split: part for split, part in parts.items() if part is not None},
        text_bytes=text_bytes,
        fast=isinstance(encoder, FastBytePairEncoder),
        **reader.problems.summary(),
    )


def task_json(task: Task) -> bytes:
    """Return a task as JSON."""
    return json.dumps(attrs.asdict(task)).encode()


def task_from_json(data: bytes) -> Task:
    """Return the task that `task_json` wrote."""
    values = json.loads(data)
    extents = tuple(Extent(**extent) for extent in values["extents"])
    return Task(index=values["index"], extents=extents, inputs=tuple(Input(**item) for item in values["inputs"]))


def unit_file(directory: Path, index: int, split: str) -> Path:
    """Return where a unit's tokens of one split are until they are committed."""
    return directory / f"{index:08d}.{split}"


class _PartWriter:
    """The tokens of one split, as they come; the file gets its name when it is complete and on the disk."""

    def __init__(self, job: EncodeJob, index: int, split: str, encoder: Encoder):
        import xxhash

        self._path = unit_file(job.directory, index, split)
        # Another process may compute the same unit, of a coordinator that is gone.
        self._partial = self._path.with_name(f".{self._path.name}-{os.uname().nodename}-{os.getpid()}")
        self._dtype = token_dtype(encoder.vocabulary_size).newbyteorder("<")
        self._digest = xxhash.xxh3_128()
        self._file: Any = None
        self._tokens = self._documents = self._max_id = 0

    def write(self, ids: np.ndarray, documents: int) -> None:
        if not len(ids):
            return
        if self._file is None:
            self._partial.unlink(missing_ok=True)  # never through a link of that name
            self._file = self._partial.open("xb", buffering=0)
        data = ids.astype(self._dtype, copy=False).data.cast("B")
        written = 0
        while written < len(data):  # an unbuffered write may be short
            written += self._file.write(data[written:])
        self._digest.update(data)
        self._tokens += len(ids)
        self._documents += documents
        self._max_id = max(self._max_id, int(ids.max()))

    def finish(self) -> UnitPart | None:
        """Give the file its name; None where there was nothing to write. Not synced: only a commit is to last."""
        if self._file is None:
            return None
        self._file.close()
        self._partial.replace(self._path)
        return UnitPart(
            tokens=self._tokens, documents=self._documents, max_id=self._max_id, digest=self._digest.hexdigest()
        )

    def close(self) -> None:
        """Leave nothing half-written behind."""
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def _encoder(name: str, wanted: str, recipe: Recipe | None) -> Encoder:
    for encoder in encoders(name, recipe):
        if fingerprint(encoder) == wanted:
            return encoder
    raise BadInput(
        f"{os.uname().nodename}: tokenizer {name} gives other tokens than where the plan was made; install the same "
        "version of tiktoken on all machines"
    )


@contextmanager
def _naming_inputs(task: Task) -> Iterator[None]:
    """Raise BadInput for what an encoder raises: a ValueError, or a panic of Rust's, which cannot even be pickled."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        names = ", ".join(item.path for item in task.inputs[:3]) + (", ..." if task.inputs[3:] else "")
        raise BadInput(f"unit {task.index}, made from {names}: cannot be encoded: {detail}; leave it out") from error


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces by the length of their text, not by their number: memory is bounded for any documents."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        if batch and characters + len(piece.text) > BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(piece)
        characters += len(piece.text)
    if batch:
        yield batch


def _encode(batch: list[Piece], encoder: Encoder, rule: SplitRule, writers: dict[str, _PartWriter]) -> int:
    """Encode a batch and hand its tokens to the writers; return the bytes of its text."""
    splits = rule.of(piece.head for piece in batch)
    for number in [0] if splits is None else np.unique(splits):
        pieces = batch if splits is None else [batch[place] for place in np.flatnonzero(splits == number)]
        ids, lengths = encoder.encode_batch([piece.text for piece in pieces])
        ends = np.cumsum(lengths)[[piece.ends_document for piece in pieces]]  # the end-of-text id goes before these
        ids = np.insert(ids, ends, np.full(len(ends), encoder.end_of_text_id, ids.dtype))
        writers[SPLITS[number]].write(ids, len(ends))
    return sum(len(piece.text) if piece.text.isascii() else len(piece.text.encode()) for piece in batch)
