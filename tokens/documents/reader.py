"""Document reader: read the documents of a unit of work from any input format, in pieces of bounded size.

A unit consists of ranges of files. A line or row belongs to the range in which it begins. A text file is one document.
A long text file is not cut exactly at the edges of the ranges. For each edge, the file is cut at the first position
after the edge where a cut changes no token. The units on both sides of an edge find the same position, so units of any
size give the same documents and tokens. With a separator, a text file contains several documents, and each document
belongs to the range in which it begins.
"""

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple

import attrs

from common.errors import BadInput
from tokens.documents import parquet, text_file
from tokens.documents.compressed import decompressed_lines
from tokens.documents.inputs import COMPRESSED_SUFFIXES, TEXT_SUFFIXES, Damaged, Extent, Input, Problems, readable
from tokens.tokenizer.template import Message
from tokens.tokenizer.tokenizer import END_OF_TEXT

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

TOO_LONG = "more than {:,} bytes without a line end; wanted one record per line"
SHOWN_FIELDS = 20  # fields shown in an error about a record without the text field
HEAD_CHARACTERS = text_file.HEAD_BYTES // 4  # characters hashed to choose a split; each has at most four bytes
WRONG_ENCODING = "wrong encoding"  # the kind of problem of a document that is lost because it is not UTF-8
SEPARATES = f"it is read as ordinary text; if it separates documents, start over with --separator '{END_OF_TEXT}'"


class Piece(NamedTuple):
    """A document, a part of a document between two cut positions, or a conversation."""

    text: str  # for a conversation, the text of all messages
    ends_document: bool
    head: str  # the first characters of the document or of the first user message, at most HEAD_CHARACTERS
    messages: tuple[Message, ...] = ()  # messages of a conversation
    where: str = ""  # file of a conversation, and its position in the file


class Part(NamedTuple):
    """The byte range of a document in a text file, and the byte range of a part of the document."""

    document_begin: int
    document_end: int
    begin: int
    end: int
    ends_document: bool


def pieces(text: str, pattern: str | None = None) -> Iterator[Piece]:
    """Yield a document in pieces, so that little memory is needed to encode a long document."""
    head, begin = text[:HEAD_CHARACTERS], 0
    while len(text) - begin > text_file.TEXT_PIECE_BYTES:
        cut = text_file.cut_position(text[begin : begin + text_file.TEXT_PIECE_BYTES], pattern=pattern)
        if not cut:
            break
        yield Piece(text[begin : begin + cut], False, head)
        begin += cut
    yield Piece(text[begin:], True, head)


@attrs.define
class Reader:
    """Reads units of work and records the problems in them."""

    _inputs: tuple[Input, ...]
    _text_field: str | None
    _separator: str | None = None
    _pattern: str | None = None  # the tokenizer's splitting pattern, which decides where a cut changes no token
    problems: Problems = attrs.field(init=False, factory=Problems)
    _quoted_field: bytes = attrs.field(init=False)  # name of the text field, as it is written in JSON
    longest_line: ClassVar[int] = text_file.LONGEST_LINE  # bytes

    def __attrs_post_init__(self) -> None:
        self._quoted_field = json.dumps(self._text_field, ensure_ascii=False).encode(errors="surrogateescape")

    def read(self, unit: tuple[Extent, ...]) -> Iterator[Piece]:
        """Yield the documents of a unit, and add everything that is left out to `problems`.

        Raises BadInput like `Input.open`.
        """
        for extent in unit:
            item = self._inputs[extent.input]
            documents = self._text if item.path.endswith(TEXT_SUFFIXES) else self._lines
            if item.path.endswith(".parquet"):
                documents = self._rows
            try:
                with item.open() as stream, readable(item.path):
                    yield from documents(item, stream, extent)
            except EOFError as error:
                raise BadInput(f"{item.path}: was truncated while it was being read; restore it") from error
            item.check()

    def _text(self, item: Input, stream: BinaryIO, extent: Extent) -> Iterator[Piece]:
        data, size = stream.read(text_file.HEAD_BYTES), item.size_bytes
        if (reason := text_file.why_no_text(data)) is not None:  # every unit of the file comes to the same conclusion
            where, lost_bytes = f"{item.path}: byte {extent.begin}", extent.end - extent.begin
            self.problems.add(WRONG_ENCODING, where, reason, int(extent.begin == 0), lost_bytes)
            return
        start = len(text_file.BYTE_ORDER_MARK) if data.startswith(text_file.BYTE_ORDER_MARK) else 0
        if self._separator is None:
            begin, end = (text_file.edge(stream, at, size, self._pattern) for at in (extent.begin, extent.end))
            ends = begin < end == size or size == 0
            yield from self._part(item, stream, data[start:], Part(start, size, max(begin, start), end, ends))
            return
        for document_begin, end in text_file.documents_from(
            stream, extent.begin, extent.end, size, self._separator.encode()
        ):
            begin = max(document_begin, start)
            stream.seek(begin)
            data = stream.read(min(text_file.HEAD_BYTES, end - begin))
            if len(data) < end - begin or data.strip():  # white space alone is not a document
                yield from self._part(item, stream, data, Part(begin, end, begin, end, True))

    def _part(self, item: Input, stream: BinaryIO, data: bytes, part: Part) -> Iterator[Piece]:
        """Yield one part of a document in a text file. `data` contains the first bytes of the document."""
        head, replaced = data.decode(errors="replace")[:HEAD_CHARACTERS], text_file.Replaced()
        ends, previous_end, contains_mark = part.ends_document, "", False
        for piece in text_file.text_pieces(stream, part.begin, part.end, replaced, self._pattern):
            if isinstance(piece, text_file.NoText):
                is_complete = (piece.begin, piece.end) == (part.document_begin, part.document_end)
                ends = ends and not is_complete
                where, lost_bytes = f"{item.path}: byte {piece.begin}", piece.end - piece.begin
                kind = WRONG_ENCODING if is_complete and piece.reason == text_file.NUL else "no text"
                self.problems.add(kind, where, piece.reason, int(is_complete), lost_bytes)
            else:
                contains_mark = contains_mark or END_OF_TEXT in previous_end + piece
                previous_end = piece[-len(END_OF_TEXT) :]
                yield Piece(piece, False, head)
        where = f"{item.path}: bytes {part.begin} to {part.end}"
        if contains_mark:
            self._add_end_of_text(where)
        if replaced.bytes:
            detail = f"{replaced.bytes:,} bytes became U+FFFD"
            self.problems.add("not UTF-8", where, detail, documents=0, lost_bytes=replaced.bytes)
        if ends:
            yield Piece("", True, head)

    def _add_end_of_text(self, where: str) -> None:
        self.problems.add(f"{END_OF_TEXT} in a text", where, SEPARATES, documents=0)

    def _lines(self, item: Input, stream: BinaryIO, extent: Extent) -> Iterator[Piece]:
        if compressed := item.path.endswith(COMPRESSED_SUFFIXES):
            zstandard = item.path.endswith(".zst")
            lines = decompressed_lines(stream, zstandard=zstandard, longest=self.longest_line)
        else:
            lines = text_file.lines_from(stream, extent.begin, extent.end, self.longest_line)
        yield from self._records(item, extent, lines, "line" if compressed else "byte")

    def _records(self, item: Input, extent: Extent, lines: Iterator[text_file.Line], unit: str) -> Iterator[Piece]:
        """Yield the documents in lines. If `unit` is "line", messages name positions such as "line 5".

        `unit` may also be "byte" or "record".
        """
        number, position, blank = 0, 0, True  # an error about damage uses the last number and position
        try:
            for number, (line, position, length) in enumerate(lines, start=1):
                where = f"{item.path}: {unit} {position if unit == 'byte' else number}"
                if line is None:
                    blank = False
                    self.problems.add("line too long", where, TOO_LONG.format(self.longest_line), lost_bytes=length)
                elif line.strip():
                    blank = False
                    yield from self._parse_line(line, where)
        except Damaged as error:
            lost_bytes = max(1, item.size_bytes - position)
            self.problems.add("damaged file", f"{item.path}: after {unit} {number}", str(error), 1, lost_bytes)
        else:
            if blank and (extent.begin, extent.end) == (0, item.size_bytes):
                self._empty(item)

    def _parse_line(self, line: bytes, where: str) -> Iterator[Piece]:
        decoded = self._decode(line, where)
        if decoded is None:
            return
        if "\0" in decoded:  # not allowed in JSON
            self.problems.add(WRONG_ENCODING, where, text_file.NUL)
            return
        try:
            record = self._load(decoded)
        except (ValueError, RecursionError) as error:
            self.problems.add("not JSON", where, f"{error}; wanted one record per line")
            return
        yield from self._record(record, where, line)

    def _load(self, text: str) -> Any:
        """Return the JSON value of a line. Raises ValueError or RecursionError."""
        return parse(text)

    def _record(self, record: Any, where: str, line: bytes) -> Iterator[Piece]:
        """Yield the text of a record, or add a problem. `line` is the record's source text."""
        if not isinstance(record, dict):
            expected = f"wanted one object per line with the field '{self._text_field}'"
            self.problems.add("no text field", where, f"got {type(record).__name__}, {expected}")
            return
        if self._text_field not in record:
            field_names = ", ".join(islice(record, SHOWN_FIELDS))
            self.problems.add(
                "no text field", where, f"no '{self._text_field}'; the record has {field_names}; pass --text-field"
            )
            return
        if line.count(self._quoted_field) > 1 and _is_duplicated(line, str(self._text_field)):
            self.problems.add(
                "field given twice", where, f"'{self._text_field}' occurs twice in the record; wanted one"
            )
            return
        text = record[self._text_field]
        if isinstance(text, str) and (b"\\u" in line or b"\xed" in line):  # surrogates may be escaped or raw
            text = self._without_lone_surrogates(text, where)
        yield from self._value(text, where)

    def _decode(self, data: bytes, where: str) -> str | None:
        """Decode a text from UTF-8, and replace damaged bytes with U+FFFD.

        If the bytes are not text in UTF-8 at all, add a problem and return None.
        """
        try:
            return data.decode("utf-8-sig", "surrogatepass")
        except UnicodeDecodeError:
            replaced = text_file.Replaced()
            text = data.decode("utf-8-sig", "replaced")
        if (reason := text_file.why_no_text(data)) is not None:
            self.problems.add(WRONG_ENCODING, where, reason)
            return None
        detail = f"{replaced.bytes:,} bytes became U+FFFD"
        self.problems.add("not UTF-8", where, detail, documents=0, lost_bytes=replaced.bytes)
        return text

    def _without_lone_surrogates(self, text: str, where: str) -> str:
        """Return the text as tiktoken reads it.

        Each surrogate pair becomes one character, and each lone surrogate becomes U+FFFD.
        """
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
            detail = "it could not be read when the plan was made"
            self.problems.add("damaged file", item.path, detail, 1, item.size_bytes)
        self._note_columns(table, extent)
        first_row = sum(table.metadata.row_group(group).num_rows for group in range(extent.begin))
        for group in range(extent.begin, extent.end):
            row = first_row
            first_row += table.metadata.row_group(group).num_rows
            try:
                for value in chain.from_iterable(parquet.values(table, group, self._text_field)):
                    row += 1
                    is_plain = (
                        isinstance(value, str) and len(value) < text_file.LONGEST_GAP and END_OF_TEXT not in value
                    )
                    if is_plain and (self._separator is None or self._separator not in value):  # nearly all values
                        yield Piece(value, True, value[:HEAD_CHARACTERS])
                    else:
                        yield from self._value(value, f"{item.path}: row {row}")
            except Damaged as error:
                self.problems.add("damaged file", f"{item.path}: after row {row}", str(error), first_row - row)

    def _note_columns(self, table: "ParquetFile", extent: Extent) -> None:
        """Count columns that are not read. For texts this does nothing: nobody expects other columns to be read."""

    def _value(self, value: Any, where: str) -> Iterator[Piece]:
        """Yield the text of a record, or add a problem."""
        if isinstance(value, UnicodeDecodeError):
            value = self._decode(value.object, where)
            if value is None:
                return
            value = self._without_lone_surrogates(value, where)
        if isinstance(value, str):
            parts = [value] if self._separator is None else value.split(self._separator)
            for text in parts if len(parts) == 1 else [part for part in parts if part.strip()]:
                if len(text) >= text_file.LONGEST_GAP and text_file.gap_position(text) is not None:
                    self.problems.add("no text", where, text_file.GAP)
                    continue
                if END_OF_TEXT in text:
                    self._add_end_of_text(where)
                yield from pieces(text, self._pattern)
            return
        kind, detail = "not a string", f"got {type(value).__name__}, wanted a string"
        self.problems.add("null text" if value is None else kind, where, detail)

    def _empty(self, item: Input) -> None:
        self.problems.add("empty file", item.path, "it contains no record", documents=0)


def parse(line: str, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return a JSON value. Raises ValueError.

    `object_of` makes an object from its key-value pairs; the default makes a dict.
    """
    try:
        return json.loads(line, object_pairs_hook=object_of)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python refuses to parse an integer of more than 4,300 digits, but it parses the same digits as a float.
        return json.loads(line, parse_int=float, object_pairs_hook=object_of)


def _is_duplicated(line: bytes, field: str) -> bool:
    """Return whether a field occurs twice in a record. `json.loads` would keep only the last value."""
    counts = list[int]()

    def count(pairs: list[tuple[str, Any]]) -> None:
        counts.append(sum(key == field for key, _ in pairs))

    json.loads(line.decode("utf-8-sig", "replace"), object_pairs_hook=count, parse_int=float)
    return counts[-1] > 1  # the outermost object is completed last
