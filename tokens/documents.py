"""The documents of a work unit, whatever the input's format, in pieces of bounded size.

A unit has ranges of files. A line or a row belongs to the range in which it begins; a long text file, which is one
document, is cut at the first place after each edge of a range where no token of GPT-2's pattern can span. Both
neighbours of an edge find the same place, so any cutting into units gives the same documents and the same tokens.
"""

import codecs
import gzip
import io
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import attrs

from errors import BadInput
from tokens.sources import COMPRESSED_SUFFIXES, TEXT_SUFFIXES, Input
from tokens.unit_plan import Extent

PIECE_BYTES = 1 << 20  # of a text file, read at a time
LONGEST_PIECE = 1 << 26  # characters without a place to cut; no text looks like that
HEAD_CHARACTERS = 1 << 16  # by which a document is told from others
LONE_SPACES = " \n\t"
ROWS_BYTES = 1 << 21  # of a Parquet column, decoded at a time, about
EDGE_BYTES = 1 << 16  # searched for a cut at a time
EDGE = re.compile(rb"\S[ \n\t](?=\S)")


class Piece(NamedTuple):
    """A whole document, or a part of one that is cut where no token of GPT-2's pattern can span."""

    text: str
    ends_document: bool
    head: str  # the document's first characters, at most HEAD_CHARACTERS


def whole(text: str) -> Piece:
    """Return a document as one piece."""
    return Piece(text, True, text[:HEAD_CHARACTERS])


@attrs.frozen(kw_only=True)
class Problem:
    """What could not be turned into tokens, or not as it was."""

    kind: str  # one or two words, to count by
    where: str  # file and line, row or byte
    detail: str
    documents: int = 1  # that are lost
    lost_bytes: int = 0  # of input, where documents cannot be counted


class Reader:
    """Reads units and keeps what was wrong with them."""

    def __init__(self, inputs: tuple[Input, ...], text_field: str):
        self.problems: list[Problem] = []
        self._inputs = inputs
        self._text_field = text_field

    def read(self, unit: tuple[Extent, ...]) -> Iterator[Piece]:
        """Yield the documents of a unit. What cannot be read is added to `problems`.

        Raises BadInput for a file that is gone or has changed.
        """
        for extent in unit:
            item = self._inputs[extent.input]
            if item.path.endswith(TEXT_SUFFIXES):
                yield from self._text(item, extent)
            elif item.path.endswith(".parquet"):
                yield from self._rows(item, extent)
            elif item.path.endswith(COMPRESSED_SUFFIXES):
                yield from self._compressed_lines(item)
            else:
                yield from self._lines(item, extent)

    def _text(self, item: Input, extent: Extent) -> Iterator[Piece]:
        with item.open() as stream:
            begin, end = _edge(stream, extent.begin, item.size_bytes), _edge(stream, extent.end, item.size_bytes)
            stream.seek(0)
            # Fewer bytes would do for most texts, but never more; a cut character at the end is beyond the head.
            head = stream.read(4 * HEAD_CHARACTERS).decode(errors="replace")[:HEAD_CHARACTERS]
            stream.seek(begin)
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            text, left = "", end - begin
            while left > 0 and (data := stream.read(min(PIECE_BYTES, left))):
                left -= len(data)
                text += decoder.decode(data)
                cut = cut_position(text)
                if cut and left:
                    yield Piece(text[:cut], False, head)
                    text = text[cut:]
                elif len(text) > LONGEST_PIECE:
                    raise BadInput(
                        f"{item.path}: {len(text):,} characters without space or symbol are no text; leave it out"
                    )
            if left:
                raise BadInput(f"{item.path}: became shorter while it was read; bring it back and start again")
            text += decoder.decode(b"", final=True)
            last = end == item.size_bytes
            if text or (last and begin < end) or item.size_bytes == 0:
                yield Piece(text, last, head)

    def _lines(self, item: Input, extent: Extent) -> Iterator[Piece]:
        with item.open() as stream:
            position = extent.begin
            if position > 0:  # a line that began before belongs to the range before
                stream.seek(position - 1)
                position += len(stream.readline()) - 1
            while position < extent.end:
                line = stream.readline()
                if not line:
                    break
                yield from self._record(line, item, position)
                position += len(line)

    def _compressed_lines(self, item: Input) -> Iterator[Piece]:
        with item.open() as stream:
            lines: Any = gzip.GzipFile(fileobj=stream)
            if item.path.endswith(".zst"):
                lines = io.BufferedReader(_ZstandardReader(stream), PIECE_BYTES)
            number = 0
            try:
                for number, line in enumerate(lines, start=1):
                    yield from self._record(line, item, number, "line")
            except (OSError, EOFError, ValueError) as error:  # EOFError: a truncated gzip
                lost = max(1, item.size_bytes - stream.tell())
                self._problem("damaged file", f"{item.path}: after line {number}", str(error), 1, lost)

    def _record(self, line: bytes, item: Input, position: int, unit: str = "byte") -> Iterator[Piece]:
        if not line.strip():
            return
        where = f"{item.path}: {unit} {position}"
        try:
            record = json.loads(line)
        except ValueError as error:
            self._problem("not JSON", where, str(error))
            return
        if not isinstance(record, dict) or self._text_field not in record:
            has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            self._problem("no text field", where, f"no '{self._text_field}'; it has {has}: pass --text-field")
            return
        text = record[self._text_field]
        if isinstance(text, str) and b"\\u" in line:
            text = self._without_lone_surrogates(text, where)
        if isinstance(text, str):
            yield whole(text)
        else:
            self._not_text(text, where)

    def _without_lone_surrogates(self, text: str, where: str) -> str:
        """Return the text as tiktoken would read it: halves that meet are one character, others become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            self._problem("lone surrogate", where, "replaced by U+FFFD", documents=0)
        return text

    def _rows(self, item: Input, extent: Extent) -> Iterator[Piece]:
        import pyarrow
        import pyarrow.parquet

        with item.open() as stream:
            try:
                table = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
                if extent.begin == extent.end:
                    raise OSError("it was not when the work was planned")
            except (OSError, pyarrow.ArrowException) as error:
                self._problem("damaged file", item.path, f"not readable as Parquet: {error}", 1, item.size_bytes)
                return
            column = [table.metadata.schema.column(index).path for index in range(table.metadata.num_columns)].index(
                self._text_field
            )
            first_row = sum(table.metadata.row_group(group).num_rows for group in range(extent.begin))
            for group in range(extent.begin, extent.end):
                metadata = table.metadata.row_group(group)
                row = first_row
                row_bytes = metadata.column(column).total_uncompressed_size / max(1, metadata.num_rows)
                rows = max(1, min(1 << 16, int(ROWS_BYTES / max(1.0, row_bytes))))
                try:
                    for batch in table.iter_batches(rows, [group], [self._text_field], use_threads=False):
                        for text in batch.column(0).to_pylist():
                            row += 1
                            if isinstance(text, str):
                                yield whole(text)
                            else:
                                self._not_text(text, f"{item.path}: row {row}")
                except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
                    left = first_row + metadata.num_rows - row
                    self._problem("damaged file", f"{item.path}: after row {row}", str(error), left)
                first_row += metadata.num_rows

    def _not_text(self, value: Any, where: str) -> None:
        kind = "null text" if value is None else "not a string"
        self._problem(kind, where, f"got {type(value).__name__}, wanted a string")

    def _problem(self, kind: str, where: str, detail: str, documents: int = 1, lost_bytes: int = 0) -> None:
        detail = detail.splitlines()[0] if detail else ""
        self.problems.append(Problem(kind=kind, where=where, detail=detail, documents=documents, lost_bytes=lost_bytes))


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


def _edge(stream: BinaryIO, position: int, size: int) -> int:
    """Return the first place from `position` on where a text file may be cut: before a lone white space, or the end."""
    if position == 0:
        return 0
    begin = position - 1
    while begin < size:
        stream.seek(max(0, begin - 3))  # the character before may have four bytes
        window = stream.read(EDGE_BYTES)
        for match in EDGE.finditer(window, begin - max(0, begin - 3)):
            space = match.start() + 1
            before = window[max(0, space - 4) : space].decode(errors="replace")[-1:]
            after = window[space + 1 : space + 5].decode(errors="replace")[:1]
            if space + 5 <= len(window) and not before.isspace() and not after.isspace():
                return max(0, begin - 3) + space
        begin += EDGE_BYTES - 8  # what lies on the seam is looked at again
    return size


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
