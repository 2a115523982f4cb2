"""Text files in pieces: cut positions that change no token, damage that is left out, and lines of bounded length.

`pattern` is the tokenizer's splitting pattern; None means GPT-2's pattern, or no pattern. If only the `tokenizers`
library understands a tokenizer, `pattern` is the description of its structure, and a text is cut only at lone white
space, which is a white-space character that has no other white space next to it. Text that is left out extends from one
cut position to another, so it does not depend on how the file is divided into units.
"""

import codecs
import json
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import IO, BinaryIO, NamedTuple

from tokens.tokenizer.known import GPT2, PATTERNS

TEXT_PIECE_BYTES = 1 << 20  # bytes of a text file that are read at a time
LINE_BLOCK_BYTES = 1 << 20  # bytes that are read at a time to skip a line
LONGEST_LINE = 1 << 26  # bytes; a file without line ends must not be read into memory completely
LONGEST_PIECE = 1 << 26  # maximum number of characters without a cut position; real text has far fewer
LONGEST_GAP = 500_000  # characters; tiktoken's engine fails on longer runs of white space (fastokens does not)
GAP = f"{LONGEST_GAP:,} or more characters of white space"
LONE_SPACES = " \n\t"
NUL = "NUL bytes: not text, or not in UTF-8; convert the file to UTF-8, or leave it out"
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
BYTE_ORDER_MARK = codecs.BOM_UTF8  # may begin a file, and is not part of the text
HEAD_BYTES = 1 << 18  # bytes at the start of a file; they decide whether the file is text
BAD_SHARE, BAD_BYTES = 0.01, 16  # share and number of bad bytes; a head that exceeds both is not text
EDGE_BYTES = 1 << 16  # number of bytes that are searched at a time for a cut position
EDGE = re.compile(rb"\S[ \n\t](?=\S)")

Line = tuple[bytes | None, int, int]  # line, position and length; line and length are as in `read_line`


def read_line(stream: IO[bytes], longest: int) -> tuple[bytes | None, int]:
    """Return the next line and its length in bytes.

    The line is None if it is longer than `longest`, and b"" at the end of the file.
    """
    line = stream.readline(longest + 1)
    if len(line) <= longest:
        return line, len(line)
    return None, len(line) + (0 if line.endswith(b"\n") else _skip_line(stream))


def lines_from(stream: BinaryIO, begin: int, end: int, longest: int) -> Iterator[Line]:
    """Yield the lines that begin in a range, with position and length. Raises EOFError if the file is too short."""
    position = begin
    if begin > 0:  # a line that began earlier belongs to the previous range
        stream.seek(begin - 1)
        position += _skip_line(stream, end - begin + 1) - 1
    while position < end:
        line, length = read_line(stream, longest)
        if not length:
            raise EOFError
        yield line, position, length
        position += length


def _skip_line(stream: IO[bytes], limit: int | None = None) -> int:
    """Skip to the next line end, but at most `limit` bytes; return how many bytes were skipped."""
    skipped = 0
    while limit is None or skipped < limit:
        part = stream.readline(LINE_BLOCK_BYTES if limit is None else min(LINE_BLOCK_BYTES, limit - skipped))
        skipped += len(part)
        if not part or part.endswith(b"\n"):
            break
    return skipped


class NoText(NamedTuple):
    """A part of a file that is left out because it is not text."""

    begin: int  # first byte
    end: int
    reason: str


class Replaced:
    """Replaces bytes that are not UTF-8 with U+FFFD, and counts these bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        codecs.register_error("replaced", self._replace)

    def _replace(self, error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        self.bytes += error.end - error.start
        return "\ufffd", error.end


def documents_from(stream: BinaryIO, begin: int, end: int, size: int, separator: bytes) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the end of each document that begins in a range.

    Separators never overlap, even if the end of the separator's text equals its beginning.
    """
    separators = _separators(stream, max(0, begin - len(separator)), size, separator)
    start = 0 if begin == 0 else next((position + len(separator) for position in separators), size)
    while start < end:
        stop = next(separators, size)
        yield start, stop
        start = stop + len(separator)


def _separators(stream: BinaryIO, begin: int, size: int, separator: bytes) -> Iterator[int]:
    """Yield the positions of a separator from `begin` on. The caller may change the stream's position meanwhile."""
    carried = b""  # the last bytes of the previous window; they are too few to contain a separator
    while begin < size:
        stream.seek(begin)
        data = stream.read(TEXT_PIECE_BYTES)
        if not data:
            raise EOFError
        window, first = carried + data, begin - len(carried)
        for match in re.finditer(re.escape(separator), window):
            yield first + match.start()
        carried, begin = window[max(0, len(window) - len(separator) + 1) :], begin + len(data)


def why_no_text(head: bytes) -> str | None:
    """Return why a file that begins with these bytes is not text in UTF-8, or None if it is text."""
    if head.startswith(WIDE_MARKS):
        return "UTF-16 or UTF-32: convert it to UTF-8"
    if _too_many(head.count(b"\0"), len(head)):
        return NUL
    replaced = Replaced()
    is_complete = len(head) < HEAD_BYTES  # a longer file's head may end inside a character
    codecs.getincrementaldecoder("utf-8")(errors="replaced").decode(head, final=is_complete)
    if _too_many(replaced.bytes, len(head)):
        return f"{replaced.bytes:,} of its first {len(head):,} bytes are not UTF-8: convert it to UTF-8"
    return None


def _too_many(bad: int, length: int) -> bool:
    """Return whether a head has too many bad bytes to be text at all, even damaged text.

    If at least half of its bytes are bad, that is always too many.
    """
    return bad > max(BAD_BYTES, BAD_SHARE * length) or 2 * bad >= length > 0


def text_pieces(
    stream: BinaryIO, begin: int, end: int, replaced: Replaced, pattern: str | None = None
) -> Iterator[str | NoText]:
    """Yield the text between two edges in pieces of about TEXT_PIECE_BYTES. Raises EOFError if the file is shorter."""
    stream.seek(begin)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replaced")
    text, start, position = "", begin, begin  # the text begins at byte `start`
    dropped = 0  # number of characters that were dropped before `text`, because there was no cut position
    while position < end:
        data = stream.read(min(TEXT_PIECE_BYTES, end - position))
        if not data:
            raise EOFError
        position += len(data)
        first_candidate = max(1, len(text) - 1)  # there is no cut position before this character
        last = position == end
        text += decoder.decode(data, final=last)
        decoded = position - len(decoder.getstate()[0])
        # A piece that is too long ends at the next cut position. Its length is known only when that position is found.
        if dropped + first_candidate > LONGEST_PIECE - 2 * TEXT_PIECE_BYTES:
            cut = _first_cut(text, first_candidate, len(text) - (not last), pattern) or (len(text) if last else 0)
            if dropped + (cut or len(text) - 2) > LONGEST_PIECE:
                if not cut:
                    dropped += len(text) - 2
                    text = text[-2:]
                    continue
                stop = decoded - len(text[cut:].encode())
                yield NoText(start, stop, f"more than {LONGEST_PIECE:,} characters without a space or symbol")
                text, start, dropped, first_candidate = text[cut:], stop, 0, 1
        cut = len(text) if last else cut_position(text, first_candidate, pattern)
        if cut:
            yield from _without_damage(text[:cut], start, pattern)
            text = text[cut:]
            start = decoded - len(text.encode())


def edge(stream: BinaryIO, position: int, size: int, pattern: str | None = None) -> int:
    """Return the first cut position of a text file from `position` on: at lone white space, or at the file's end."""
    if position == 0:
        return 0
    begin = position - 1
    while begin < size:
        stream.seek(max(0, begin - 3))  # the character before the space may have four bytes
        window = stream.read(EDGE_BYTES)
        for match in EDGE.finditer(window, begin - max(0, begin - 3)):
            space = match.start() + 1
            before = window[max(0, space - 4) : space].decode(errors="replace")[-1:]
            after = window[space + 1 : space + 5].decode(errors="replace")[:1]
            if space + 5 <= len(window) and _can_cut(f"{before}{chr(window[space])}{after}", 1, pattern):
                return max(0, begin - 3) + space
        begin += EDGE_BYTES - 8  # windows overlap
    return size


def cut_position(text: str, first: int = 1, pattern: str | None = None) -> int:
    """Return the last position, not before `first`, where a cut changes no token, or 0 if there is none.

    Patterns match letters, digits, other characters and white space in separate runs. So no match spans the position
    before a lone white space, or the position before a symbol that follows a letter (except the apostrophe in "'s"),
    and no pattern looks back. In all patterns except GPT-2's, line ends belong to the symbols before them. If the
    pattern is unknown, or if there are added tokens, a match may span a symbol, so text is cut only at lone white
    space.
    """
    return next((position for position in range(len(text) - 2, first - 1, -1) if _can_cut(text, position, pattern)), 0)


def cut_positions(text: str, pattern: str | None = None) -> list[int]:
    """Return all positions where a cut changes no token."""
    return [position for position in range(1, len(text) - 1) if _can_cut(text, position, pattern)]


def gap_position(text: str, begin: int = 0) -> int | None:
    """Return a position after `begin` in a run of at least LONGEST_GAP white-space characters, or else None."""
    for position in range(begin + LONGEST_GAP - 1, len(text), LONGEST_GAP):
        if text[position].isspace():
            before, after = text[position - LONGEST_GAP + 1 : position], text[position : position + LONGEST_GAP]
            if len(before) - len(before.rstrip()) + len(after) - len(after.lstrip()) >= LONGEST_GAP:
                return position
    return None


def _first_cut(text: str, begin: int, end: int, pattern: str | None) -> int:
    return next((position for position in range(max(1, begin), end) if _can_cut(text, position, pattern)), 0)


def _can_cut(text: str, position: int, pattern: str | None) -> bool:
    before, character, after = text[position - 1], text[position], text[position + 1 : position + 2]
    if character == "\n" and pattern not in (None, GPT2) and not before.isalnum():
        return False
    if character in LONE_SPACES:
        is_lone = not before.isspace() and not after.isspace()
        return is_lone and not (pattern is not None and _in_added_token(before, character, after, pattern))
    if pattern is not None and pattern not in PATTERNS.values():
        return False
    return character != "'" and before.isalpha() and unicodedata.category(character)[0] in "PS"


def _in_added_token(before: str, character: str, after: str, pattern: str) -> bool:
    """Return whether white space with these neighbors may be inside an added token, or at its end."""
    return any(
        (previous, space) == (before, character) and following in ("", after)
        for previous, space, following in _spaces_of_added_tokens(pattern)
    )


@lru_cache(maxsize=8)
def _spaces_of_added_tokens(pattern: str) -> frozenset[tuple[str, str, str]]:
    """Return each white-space character in a structure's added tokens, with the characters before and after it.

    The character after it is "" if the token ends there. The `tokenizers` library looks for an added token such as
    "New York" in the whole text before the text is split.
    """
    if not pattern.startswith("{"):  # a splitting pattern, not a structure
        return frozenset()
    contents = [str(token["content"]) for token in json.loads(pattern)["added_tokens"]]
    return frozenset(
        (content[position - 1], content[position], content[position + 1 : position + 2])
        for content in contents
        for position in range(1, len(content))
        if content[position] in LONE_SPACES
    )


def _without_damage(text: str, start: int, pattern: str | None) -> Iterator[str | NoText]:
    """Yield the parts of a text. A part that contains a gap or a NUL is a NoText; any other part is a string.

    The text must begin and end at cut positions. The same is then true of every part.
    """
    done, gap, nul = 0, gap_position(text), text.find("\0")
    while gap is not None or nul >= 0:
        is_gap = gap is not None and not 0 <= nul < gap
        position = gap if is_gap and gap is not None else nul
        begin = next((cut for cut in range(position - 1, done, -1) if _can_cut(text, cut, pattern)), done)
        end = _first_cut(text, position, len(text), pattern) or len(text)
        if begin > done:
            yield text[done:begin]
        begin_byte = start + len(text[done:begin].encode())
        start = begin_byte + len(text[begin:end].encode())
        yield NoText(begin_byte, start, GAP if is_gap else NUL)
        done, nul = end, text.find("\0", end)
        if gap is not None and gap < end:
            gap = gap_position(text, end)
    if done < len(text):
        yield text[done:]
