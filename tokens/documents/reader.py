"""Document reader: the documents of a unit of work, of any input format, in pieces of bounded size.

A unit has ranges of files. A line or a row belongs to the range in which it begins. A long text file, which is one
document, is cut at the first position after each edge of a range that no token of GPT-2's pattern can span. Both
neighbors of an edge find the same position, so units of any size give the same documents and tokens.
"""

import json
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple

from common.errors import BadInput
from tokens.documents import parquet
from tokens.documents.compressed import decompressed_lines
from tokens.documents.inputs import COMPRESSED_SUFFIXES, TEXT_SUFFIXES, Damaged, Extent, Input, look_up, readable
from tokens.documents.problems import Problems
from tokens.documents.text_file import (
    BYTE_ORDER_MARK,
    GAP,
    HEAD_BYTES,
    LONGEST_GAP,
    LONGEST_LINE,
    PIECE_BYTES,
    NoText,
    Replaced,
    cut_position,
    edge,
    gap_position,
    lines_from,
    text_pieces,
    why_no_text,
)

TOO_LONG = f"more than {LONGEST_LINE:,} bytes without a line end; wanted one record a line"
SHOWN_FIELDS = 20  # in an error, of a record without the text field
HEAD_CHARACTERS = HEAD_BYTES // 4  # hashed for the split of a document; four bytes each at most


class Piece(NamedTuple):
    """A document, or a part of one between cut positions."""

    text: str
    ends_document: bool
    head: str  # the document's first characters, at most HEAD_CHARACTERS


def pieces(text: str) -> Iterator[Piece]:
    """Yield a document in pieces, so that encoding a long one needs little memory."""
    head, begin = text[:HEAD_CHARACTERS], 0
    while len(text) - begin > PIECE_BYTES and (cut := cut_position(text[begin : begin + PIECE_BYTES])):
        yield Piece(text[begin : begin + cut], False, head)
        begin += cut
    yield Piece(text[begin:], True, head)


class Reader:
    """Reader of units, with the problems found in them."""

    def __init__(self, inputs: tuple[Input, ...], text_field: str):
        self.problems = Problems()
        self._inputs = inputs
        self._text_field = text_field

    def read(self, unit: tuple[Extent, ...]) -> Iterator[Piece]:
        """Yield the documents of a unit; add what is left out to `problems`.

        Raises BadInput for a file that is missing, has changed, or cannot be read because of a system error.
        """
        for extent in unit:
            item = self._inputs[extent.input]
            try:
                with item.open() as stream, readable(item.path):
                    yield from self._documents(item, stream, extent)
            except EOFError as error:
                raise BadInput(
                    f"{item.path}: became shorter while it was read; bring it back and start again"
                ) from error
            item.compare(look_up(item.path))

    def _documents(self, item: Input, stream: BinaryIO, extent: Extent) -> Iterator[Piece]:
        if item.path.endswith(TEXT_SUFFIXES):
            return self._text(item, stream, extent)
        if item.path.endswith(".parquet"):
            return self._rows(item, stream, extent)
        return self._lines(item, stream, extent)

    def _text(self, item: Input, stream: BinaryIO, extent: Extent) -> Iterator[Piece]:
        data = stream.read(HEAD_BYTES)
        if (reason := why_no_text(data)) is not None:  # every unit of the file finds the same
            where, lost_bytes = f"{item.path}: byte {extent.begin}", extent.end - extent.begin
            self.problems.add("no text", where, reason, int(extent.begin == 0), lost_bytes)
            return
        begin, end = (edge(stream, position, item.size_bytes) for position in (extent.begin, extent.end))
        ends = begin < end == item.size_bytes or item.size_bytes == 0
        start = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
        head = data[start:].decode(errors="replace")[:HEAD_CHARACTERS]
        begin, replaced = max(begin, start), Replaced()
        for piece in text_pieces(stream, begin, end, replaced):
            if isinstance(piece, NoText):
                everything = piece.begin == start and piece.end == item.size_bytes
                ends = ends and not everything
                where, lost_bytes = f"{item.path}: byte {piece.begin}", piece.end - piece.begin
                self.problems.add("no text", where, piece.reason, int(everything), lost_bytes)
            else:
                yield Piece(piece, False, head)
        if replaced.bytes:
            where, detail = f"{item.path}: bytes {begin} to {end}", f"{replaced.bytes:,} bytes became U+FFFD"
            self.problems.add("not UTF-8", where, detail, documents=0, lost_bytes=replaced.bytes)
        if ends:
            yield Piece("", True, head)

    def _lines(self, item: Input, stream: BinaryIO, extent: Extent) -> Iterator[Piece]:
        if compressed := item.path.endswith(COMPRESSED_SUFFIXES):
            lines = decompressed_lines(stream, zstandard=item.path.endswith(".zst"))
        else:
            lines = lines_from(stream, extent.begin, extent.end)
        number, position, blank = 0, 0, True
        try:
            for number, (line, position, length) in enumerate(lines, start=1):  # told after the loop
                where = f"{item.path}: line {number}" if compressed else f"{item.path}: byte {position}"
                if line is None:
                    blank = False
                    self.problems.add("line too long", where, TOO_LONG, lost_bytes=length)
                elif line.strip():
                    blank = False
                    yield from self._record(line, where)
        except Damaged as error:
            lost = max(1, item.size_bytes - position)
            self.problems.add("damaged file", f"{item.path}: after line {number}", str(error), 1, lost)
        else:
            if blank and (extent.begin, extent.end) == (0, item.size_bytes):
                self._empty(item)

    def _record(self, line: bytes, where: str) -> Iterator[Piece]:
        try:
            record = _parse(line)
        except (ValueError, RecursionError) as error:
            self.problems.add("not JSON", where, str(error))
            return
        if not isinstance(record, dict) or self._text_field not in record:
            has = ", ".join(islice(record, SHOWN_FIELDS)) if isinstance(record, dict) else type(record).__name__
            self.problems.add("no text field", where, f"no '{self._text_field}'; it has {has}: pass --text-field")
            return
        text = record[self._text_field]
        # Surrogates may be escaped, raw, or in UTF-16: json.loads lets all pass.
        if isinstance(text, str) and (b"\\u" in line or b"\xed" in line or b"\0" in line):
            text = self._without_lone_surrogates(text, where)
        yield from self._value(text, where)

    def _without_lone_surrogates(self, text: str, where: str) -> str:
        """Return the text as tiktoken reads it: halves that meet are one character, others become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            self.problems.add("lone surrogate", where, "replaced by U+FFFD", documents=0)
        return text

    def _rows(self, item: Input, stream: BinaryIO, extent: Extent) -> Iterator[Piece]:
        if item.size_bytes == 0:
            self._empty(item)
            return
        try:
            table = parquet.open_parquet(stream)
        except Damaged as error:
            self.problems.add("damaged file", item.path, f"not readable as Parquet: {error}", 1, item.size_bytes)
            return
        if table.metadata.num_rows == 0:
            self._empty(item)
        elif extent.begin == extent.end:
            self.problems.add(
                "damaged file", item.path, "it could not be read when the plan was made", 1, item.size_bytes
            )
        first_row = sum(table.metadata.row_group(group).num_rows for group in range(extent.begin))
        for group in range(extent.begin, extent.end):
            row = first_row
            first_row += table.metadata.row_group(group).num_rows
            try:
                for value in chain.from_iterable(parquet.texts(table, group, self._text_field)):
                    row += 1
                    if isinstance(value, str) and len(value) < LONGEST_GAP:  # as nearly all are
                        yield Piece(value, True, value[:HEAD_CHARACTERS])
                    else:
                        yield from self._value(value, f"{item.path}: row {row}")
            except Damaged as error:
                self.problems.add("damaged file", f"{item.path}: after row {row}", str(error), first_row - row)

    def _value(self, value: Any, where: str) -> Iterator[Piece]:
        """Yield the text of a record, or add a problem."""
        if isinstance(value, str) and (len(value) < LONGEST_GAP or gap_position(value) is None):
            yield from pieces(value)
            return
        kind, detail = "not a string", f"got {type(value).__name__}, wanted a string"
        if value is None:
            kind = "null text"
        elif isinstance(value, str):
            kind, detail = "no text", GAP
        elif isinstance(value, UnicodeDecodeError):
            kind, detail = "not UTF-8", str(value)
        self.problems.add(kind, where, detail)

    def _empty(self, item: Input) -> None:
        self.problems.add("empty file", item.path, "it holds no record", documents=0)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        return json.loads(line, parse_int=float)  # Python makes no integer of more than 4,300 digits
