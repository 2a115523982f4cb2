"""Unit of work, in any process that sees the files: documents to token files of its own, and numbers about them."""

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

BATCH_CHARACTERS = 1 << 19  # of text, encoded at a time
# A unit's tokens, also while a process writes them; tasks of worker processes; the recipe of the fast encoder.
_OWN_NAMES = re.compile(
    rf"\d{{8,}}\.({'|'.join(SPLITS)})|\.\d{{8,}}\.({'|'.join(SPLITS)})-.+-\d+|(\.partial-)?(\d{{8,}}\.task|recipe\.json)"
)


@attrs.frozen(kw_only=True)
class EncodeJob:
    """Settings that all units share."""

    directory: Path  # of the units' files; its parent holds the ranks
    settings: PrepareSettings
    tokenizer: TokenizerRecord
    recipe: Path | None  # tokenizer.json for the fast encoder


@attrs.frozen(kw_only=True)
class Task:
    """One unit, and the inputs that its extents number."""

    index: int
    extents: tuple[Extent, ...]  # numbered as below
    inputs: tuple[Input, ...]


@attrs.frozen(kw_only=True)
class UnitPart:
    """Tokens that a unit has written for one split."""

    tokens: int
    documents: int  # that end here
    empty_documents: int = 0  # of these, without text; before version 2 of the rules they were not told apart
    counted: int = 0  # tokens of conversations that count in the loss
    padding: int = 0  # tokens after the last conversation of a row
    max_id: int
    digest: str  # xxh3_128 of the bytes, in hexadecimal


@attrs.frozen(kw_only=True)
class Result:
    """Result of a unit."""

    index: int
    parts: dict[str, UnitPart]  # by split; none for a split without tokens
    text_bytes: int  # of documents, in UTF-8
    fast: bool  # computed by the fast encoder
    problems: dict[str, int]  # how often, by kind
    lost_documents: int
    lost_bytes: int  # of input
    examples: dict[str, list[str]]  # the first ones, by kind; kinds that lost something come first


def run_unit(job: EncodeJob, task: Task) -> Result:
    """Write the tokens of a unit into `unit_file`s, each time the same. Raises BadInput for an input, and OSError."""
    settings, encoder = job.settings, _encoder(job.tokenizer, job.directory.parent, job.recipe)
    if settings.template is None:
        reader = Reader(task.inputs, settings.text_field, settings.separator, settings.splitting)
    else:
        assert isinstance(encoder, Tokenizer)  # of conversations there is no recipe of a faster one
        reader = ConversationReader(task.inputs, encoder.special_tokens)
    paths = {split: unit_file(job.directory, task.index, split) for split in SPLITS}
    writers = {split: _PartWriter(paths[split], settings, encoder, reader.problems) for split in SPLITS}
    text_bytes = 0
    try:
        for batch in _batches(reader.read(task.extents)):
            try:
                text_bytes += _encode(batch, settings, writers)
            except BaseException as error:  # the encoder's: a ValueError, or a panic of Rust's, which no pickle holds
                if not isinstance(error, ValueError | BadInput) and type(error).__name__ != "PanicException":
                    raise
                said = (str(error).splitlines() or [type(error).__name__])[0]
                made = ", ".join(item.path for item in task.inputs[:3]) + (", ..." if task.inputs[3:] else "")
                raise BadInput(f"unit {task.index}, from {made}: cannot be encoded: {said}; leave it out") from error
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
    """Return the file of a unit's tokens of one split, until they are committed."""
    return directory / f"{index:08d}.{split}"


def delete_own_files(units: Path) -> None:
    """Delete the files that preparations have written into a folder of units, and the folder if nothing else is there.

    Whatever has another name is a user's, and stays with its folder.
    """
    for path in [*units.glob("*")] if units.is_dir() else []:
        if _OWN_NAMES.fullmatch(path.name):
            path.unlink(missing_ok=True)  # a worker of a coordinator that was killed may delete it, too
    with suppress(OSError):
        units.rmdir()


class _PartWriter:
    """Writer of a unit's tokens of one split; the file gets its name when it is complete."""

    def __init__(self, path: Path, settings: PrepareSettings, encoder: Encoder, problems: Problems):
        import xxhash

        self._path = path
        self._settings = settings
        self._encoder = encoder
        self._packer = None
        if settings.template is not None and isinstance(encoder, Tokenizer):
            self._packer = Packer(settings, encoder, self._write, problems)
        # A worker of a coordinator that was killed may compute the same unit.
        self._partial = path.with_name(f".{path.name}-{os.uname().nodename}-{os.getpid()}")
        self._digest = xxhash.xxh3_128()
        self._file: BinaryIO | None = None
        self._counts: Counter[str] = Counter()
        self._max_id = 0

    def add(self, pieces: list[Piece]) -> list[Piece]:
        """Write the tokens of texts, an end-of-text id after each document; or pack conversations. Return those."""
        if self._packer is not None:
            return self._packer.add(pieces)
        ids, lengths = self._encoder.encode_batch([piece.text for piece in pieces])
        ends = np.cumsum(lengths)[[piece.ends_document for piece in pieces]]  # the end-of-text id goes before these
        ids = np.insert(ids, ends, np.full(len(ends), self._encoder.end_of_text_id, ids.dtype))
        empty = sum(piece.ends_document and piece.head == "" for piece in pieces)
        self._write(ids, documents=len(ends), empty_documents=empty)
        return pieces

    def _write(self, ids: np.ndarray, **counts: int) -> None:
        """Write ids, or words of packed conversations; `counts`: fields of the part."""
        if not len(ids):
            return
        if self._file is None:
            self._partial.unlink(missing_ok=True)  # never through a link of that name
            self._file = self._partial.open("xb")
        data = ids.astype(self._settings.growing_dtype, copy=False).data.cast("B")
        with naming(self._partial):
            self._file.write(data)
        self._digest.update(data)
        self._counts.update(tokens=len(ids), **counts)
        plain = ids if self._packer is None else ids & LARGEST_ID
        self._max_id = max(self._max_id, int(plain.max()))

    def finish(self) -> UnitPart | None:
        """Give the file its name; None if nothing was written. Not synced: only a commit must survive a crash."""
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
    problem = f"{os.uname().nodename}: tokenizer {record.name} gives other tokens than where the plan was made"
    raise BadInput(f"{problem}; install the same version of tiktoken on all machines")


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces by the length of their text, not by number, so that memory is bounded for any documents."""
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
    """Encode a batch and write its tokens; return the bytes of the texts that were written."""
    splits = settings.splits_of(piece.head for piece in batch)
    written = list[Piece]()
    for number in [0] if splits is None else np.unique(splits):
        pieces = batch if splits is None else [batch[place] for place in np.flatnonzero(splits == number)]
        written += writers[SPLITS[number]].add(pieces)
    return sum(len(piece.text) if piece.text.isascii() else len(piece.text.encode()) for piece in written)
