"""Every input format as one stream of texts: files, folders, globs, JSON lines, Parquet, Hugging Face datasets.

A long text file arrives in pieces, so that memory does not grow with the file; `ends_document` marks the last.
"""

import codecs
import glob
import gzip
import hashlib
import io
import json
import sysconfig
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from errors import BadInput

TEXT_SUFFIXES = (".txt", ".md", ".py")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, ".parquet")
STANDARD_LIBRARY = "stdlib"
PIECE_BYTES = 1 << 20  # of a text file, read at a time
LONGEST_PIECE = 1 << 26  # characters without a place to cut; no text looks like that
LONE_SPACES = " \n\t"
PARQUET_ROWS = 256  # decoded at a time


@attrs.frozen
class Piece:
    """A whole document, or a part of one that is cut where no token of GPT-2's pattern can span."""

    text: str
    ends_document: bool
    position: int  # bytes of all sources read so far, as they lie on disk; 0 where that is unknown


@attrs.frozen
class Source:
    """One argument of prepare_data.py, resolved to files; a Hugging Face dataset has none."""

    name: str
    files: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def resolve_sources(names: list[str]) -> list[Source]:
    """Return the files behind each SOURCE, in sorted order. Raises BadInput where there are none."""
    return [_resolve(name) for name in names]


def read_documents(sources: list[Source], text_field: str) -> Iterator[Piece]:
    """Yield the documents of the sources in order. Raises BadInput naming file and line of what cannot be read."""
    done = 0
    for source in sources:
        if source.name.startswith("hf:"):
            yield from _read_hugging_face(source.name, text_field, done)
        for file in source.files:
            for piece in _read_file(file, text_field):
                yield attrs.evolve(piece, position=done + piece.position)
            done += file.stat().st_size


def _resolve(name: str) -> Source:
    if name.startswith("hf:"):
        return Source(name, ())
    if name == STANDARD_LIBRARY:
        return Source(name, _standard_library())
    path = Path(name)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES)]
        if not found:
            raise BadInput(f"{name}: a folder without documents; wanted files ending in {', '.join(SUFFIXES)}")
    else:
        found = [path] if path.is_file() else [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207  # absolute patterns
        found = [file for file in found if file.is_file()]
        if not found:
            raise BadInput(f"{name}: no such file, folder or glob; quote a glob so that the shell leaves it alone")
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise BadInput(f"{file}: unknown kind of document; wanted a name ending in {', '.join(SUFFIXES)}")
    return Source(name, tuple(sorted(found)))


def _standard_library() -> tuple[Path, ...]:
    """Return the running Python's own library sources, without installed packages and without its test suites.

    In the order of a hash of their names, so that the last documents are a fair sample of all.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)]
    return tuple(sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest()))


def _read_file(file: Path, text_field: str) -> Iterator[Piece]:
    try:
        if file.name.endswith(TEXT_SUFFIXES):
            yield from _read_text(file)
        elif file.name.endswith(RECORD_SUFFIXES):
            yield from _read_records(file, text_field)
        else:
            yield from _read_parquet(file, text_field)
    except (OSError, EOFError) as error:  # EOFError: a truncated gzip
        raise BadInput(f"{file}: cannot be read: {error}") from error


def _read_text(file: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with file.open("rb") as stream:
        text = ""
        while data := stream.read(PIECE_BYTES):
            text += decoder.decode(data)
            cut = cut_position(text)
            if cut:
                yield Piece(text[:cut], False, stream.tell())
                text = text[cut:]
            elif len(text) > LONGEST_PIECE:
                raise BadInput(f"{file}: {len(text):,} characters without space or symbol are no text; leave it out")
        yield Piece(text + decoder.decode(b"", final=True), True, stream.tell())


def cut_position(text: str) -> int:
    """Return the last position where the text can be cut without changing its GPT-2 tokens, or 0 for none.

    GPT-2's pattern matches letters, digits, other characters and white space in runs of their own. So no match spans
    the place before a lone white space, nor before a symbol (but for the apostrophe of "'s") that follows a letter.
    """
    for place in range(len(text) - 2, 0, -1):
        before, here, after = text[place - 1], text[place], text[place + 1]
        if here in LONE_SPACES:
            if not before.isspace() and not after.isspace():
                return place
        elif here != "'" and before.isalpha() and unicodedata.category(here)[0] in "PS":
            return place
    return 0


def _read_records(file: Path, text_field: str) -> Iterator[Piece]:
    with file.open("rb") as stream:
        for number, line in enumerate(_decompressed(file, stream), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise BadInput(f"{file}: line {number}: not JSON: {error}") from error
            yield Piece(_text_of(record, text_field, f"{file}: line {number}"), True, stream.tell())


def _decompressed(file: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file whose name tells its compression; `stream` is at the bytes taken from disk."""
    if file.name.endswith(".gz"):
        yield from gzip.GzipFile(fileobj=stream)
    elif file.name.endswith(".zst"):
        yield from io.BufferedReader(_ZstandardReader(stream))
    else:
        yield from stream


class _ZstandardReader(io.RawIOBase):
    """Decompresses frame after frame; unlike zstandard's own reader it notices a file that is cut short."""

    def __init__(self, stream: BinaryIO):
        import zstandard

        self._stream = stream
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._in_frame = False
        self._waiting = b""
        self._error = zstandard.ZstdError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            data = self._frame.unused_data or self._stream.read(PIECE_BYTES)
            if not data:
                if self._in_frame:
                    raise OSError("the Zstandard stream is cut short")
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            try:
                self._waiting = self._frame.decompress(data)
            except self._error as error:
                raise OSError(f"not a Zstandard stream: {error}") from error
            self._in_frame = not self._frame.eof
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count


def _read_parquet(file: Path, text_field: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            raise BadInput(
                f"{file}: no column '{text_field}'; it has {', '.join(table.schema_arrow.names)}: pass --text-field"
            )
        rows, size, row = table.metadata.num_rows, file.stat().st_size, 0
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield Piece(_text_of({text_field: text}, text_field, f"{file}: row {row}"), True, size * row // rows)
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{file}: not readable as Parquet: {error}") from error


def _read_hugging_face(name: str, text_field: str, position: int) -> Iterator[Piece]:
    """Stream a dataset of the hub, hf:OWNER/NAME[:CONFIG], through `datasets`; its train split where it has several."""
    import datasets

    repository, _, configuration = name.removeprefix("hf:").partition(":")
    try:
        stream = datasets.load_dataset(repository, configuration or None, split="train", streaming=True)
        for number, record in enumerate(stream, start=1):
            yield Piece(_text_of(record, text_field, f"{name}: record {number}"), True, position)
    except (OSError, ValueError) as error:  # ConnectionError, DatasetNotFoundError; unknown configuration or split
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{name}: cannot be streamed from the hub: {detail}") from error


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict) or text_field not in record:
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise BadInput(f"{where}: no field '{text_field}'; it has {has}: pass --text-field")
    text = record[text_field]
    if not isinstance(text, str):
        raise BadInput(f"{where}: field '{text_field}': got {type(text).__name__}, wanted a string")
    return text
