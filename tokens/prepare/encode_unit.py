"""Unit of work: convert documents to token files, in any process that can read the inputs, and count the tokens."""

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np

from common.errors import BadInput
from common.files import naming
from tokens.documents.conversations import ConversationReader
from tokens.documents.inputs import Extent, Input, Problems
from tokens.documents.reader import Piece, Reader
from tokens.format.manifest import SPLITS, TokenizerRecord
from tokens.prepare.packing import Packer
from tokens.prepare.plan import LARGEST_ID, PrepareSettings
from tokens.tokenizer.fast_encoder import FastBytePairEncoder, encoders
from tokens.tokenizer.tokenizer import Encoder, Tokenizer, fingerprint

BATCH_CHARACTERS = 1 << 19  # characters of text that are encoded at a time
# Matches the names of three kinds of files: files (complete or not) with the tokens of a unit, files with the task of a
# worker, and the file with the recipe of the fast encoder.
_OWN_NAMES = re.compile(
    rf"\d{{8,}}\.({'|'.join(SPLITS)})|\.\d{{8,}}\.({'|'.join(SPLITS)})-.+-\d+|(\.partial-)?(\d{{8,}}\.task|recipe\.json)"
)


@attrs.frozen(kw_only=True)
class EncodeJob:
    """Settings that all units share."""

    directory: Path  # folder of the units' files; its parent contains the ranks
    settings: PrepareSettings
    tokenizer: TokenizerRecord
    recipe: Path | None  # tokenizer.json for the fast encoder


@attrs.frozen(kw_only=True)
class Task:
    """One unit, and the inputs to which its extents refer."""

    index: int
    extents: tuple[Extent, ...]  # their `input` is an index in `inputs`
    inputs: tuple[Input, ...]


@attrs.frozen(kw_only=True)
class UnitPart:
    """The tokens that a unit has written for one split."""

    tokens: int
    documents: int  # documents that end in this unit
    empty_documents: int = 0  # how many of these documents have no text; version 1 of the rules did not count them
    counted: int = 0  # number of tokens that count in the loss; 0 for plain text
    padding: int = 0  # tokens after the last conversation of a row
    max_id: int
    digest: str  # xxh3_128 of the bytes, in hexadecimal


@attrs.frozen(kw_only=True)
class Result:
    """The outcome of a unit."""

    index: int
    parts: dict[str, UnitPart]  # by split; a split without tokens has no part
    text_bytes: int  # bytes of documents in UTF-8
    fast: bool  # True if the fast encoder was used
    problems: dict[str, int]  # number of problems, by kind
    lost_documents: int
    lost_bytes: int  # bytes of input
    examples: dict[str, list[str]]  # a few examples of each kind of problem; kinds that caused a loss come first


def run_unit(job: EncodeJob, task: Task) -> Result:
    """Write the tokens of a unit to its `unit_file`s. Every call writes the same bytes.

    Raises OSError, and raises BadInput if an input cannot be read or encoded.
    """
    settings, encoder = job.settings, _encoder(job.tokenizer, job.directory.parent, job.recipe)
    if settings.template is None:
        reader = Reader(task.inputs, settings.text_field, settings.separator, settings.splitting)
    else:
        assert isinstance(encoder, Tokenizer)  # conversations are never encoded by the fast encoder
        reader = ConversationReader(task.inputs, encoder.special_tokens)
    paths = {split: unit_file(job.directory, task.index, split) for split in SPLITS}
    writers = {split: _PartWriter(paths[split], settings, encoder, reader.problems) for split in SPLITS}
    text_bytes = 0
    try:
        for batch in _batches(reader.read(task.extents)):
            try:
                text_bytes += _encode(batch, settings, writers)
            except BaseException as error:
                # The encoder may raise ValueError, or panic in Rust with an exception that cannot be pickled.
                if not isinstance(error, ValueError | BadInput) and type(error).__name__ != "PanicException":
                    raise
                encoder_message = (str(error).splitlines() or [type(error).__name__])[0]
                input_names = ", ".join(item.path for item in task.inputs[:3]) + (", ..." if task.inputs[3:] else "")
                raise BadInput(
                    f"unit {task.index}, from {input_names}: cannot be encoded: {encoder_message}; leave this input out"
                ) from error
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


def unit_file(directory: Path, index: int, split: str) -> Path:
    """Return the path of a file with a unit's tokens for one split. The file exists until its tokens are committed."""
    return directory / f"{index:08d}.{split}"


def delete_own_files(units: Path) -> None:
    """Delete the files that preparations have written to a folder of units, and the folder if it is then empty.

    Files with other names belong to the user. They stay, and so does their folder.
    """
    for path in [*units.glob("*")] if units.is_dir() else []:
        if _OWN_NAMES.fullmatch(path.name):
            path.unlink(missing_ok=True)  # a worker whose coordinator was killed may delete the file, too
    with suppress(OSError):
        units.rmdir()


class _PartWriter:
    """Writes a unit's tokens for one split to a file. The file gets its final name when it is complete."""

    def __init__(self, path: Path, settings: PrepareSettings, encoder: Encoder, problems: Problems):
        import xxhash

        self._path = path
        self._settings = settings
        self._encoder = encoder
        self._packer = None
        if settings.template is not None and isinstance(encoder, Tokenizer):
            self._packer = Packer(settings, encoder, self._write, problems)
        # A worker whose coordinator was killed may compute the same unit, so every process has a separate file.
        self._partial = path.with_name(f".{path.name}-{os.uname().nodename}-{os.getpid()}")
        self._digest = xxhash.xxh3_128()
        self._file: BinaryIO | None = None
        self._counts: Counter[str] = Counter()
        self._max_id = 0

    def add(self, pieces: list[Piece]) -> list[Piece]:
        """Write the tokens of texts, with an end-of-text id after each document, or collect conversations to pack.

        Returns the pieces that were accepted.
        """
        if self._packer is not None:
            return self._packer.add(pieces)
        ids, lengths = self._encoder.encode_batch([piece.text for piece in pieces])
        # The end-of-text ids are inserted before these positions.
        ends = np.cumsum(lengths)[[piece.ends_document for piece in pieces]]
        ids = np.insert(ids, ends, np.full(len(ends), self._encoder.end_of_text_id, ids.dtype))
        empty = sum(piece.ends_document and piece.head == "" for piece in pieces)
        self._write(ids, documents=len(ends), empty_documents=empty)
        return pieces

    def _write(self, ids: np.ndarray, **counts: int) -> None:
        """Write ids, or words of packed conversations. `counts` are fields of the `UnitPart`."""
        if not len(ids):
            return
        if self._file is None:
            self._partial.unlink(missing_ok=True)  # never write through a link with that name
            self._file = self._partial.open("xb")
        data = ids.astype(self._settings.growing_dtype, copy=False).data.cast("B")
        with naming(self._partial):
            self._file.write(data)
        self._digest.update(data)
        self._counts.update(tokens=len(ids), **counts)
        plain_ids = ids if self._packer is None else ids & LARGEST_ID
        self._max_id = max(self._max_id, int(plain_ids.max()))

    def finish(self) -> UnitPart | None:
        """Give the file its final name, and return the `UnitPart`, or None if nothing was written.

        The file is not synced, because tokens need not survive a crash before they are committed.
        """
        if self._packer is not None:
            self._packer.flush()
        if self._file is None:
            return None
        with naming(self._partial):
            self._file.close()
        self._partial.replace(self._path)
        return UnitPart(**self._counts, max_id=self._max_id, digest=self._digest.hexdigest())

    def close(self) -> None:
        """Delete the file if it is incomplete."""
        if self._file is not None:
            with naming(self._partial):
                self._file.close()
            self._partial.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def _encoder(record: TokenizerRecord, ranks: Path, recipe: Path | None) -> Encoder:
    for encoder in encoders(record, ranks, recipe):
        if fingerprint(encoder) == record.fingerprint:
            return encoder
    got = f"{os.uname().nodename}: tokenizer {record.name} gives different tokens here"
    problem = f"{got} than on the machine that made the plan"
    raise BadInput(f"{problem}; install the same version of tiktoken on all machines")


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces. To bound memory, the total length of the texts in a batch is limited."""
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


def _encode(batch: list[Piece], settings: PrepareSettings, writers: dict[str, _PartWriter]) -> int:
    """Encode a batch and write its tokens. Return the size in bytes of the texts that were written."""
    splits = settings.splits_of(piece.head for piece in batch)
    written_pieces = list[Piece]()
    for number in [0] if splits is None else np.unique(splits):
        pieces = batch if splits is None else [batch[index] for index in np.flatnonzero(splits == number)]
        written_pieces += writers[SPLITS[number]].add(pieces)
    return sum(len(piece.text) if piece.text.isascii() else len(piece.text.encode()) for piece in written_pieces)
