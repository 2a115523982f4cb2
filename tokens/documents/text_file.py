"""A text as pieces: where it can be cut without changing its tokens, and what is no text.

What is left out of a text file goes from one place to cut to the next one, so it does not depend on the units.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

PIECE_BYTES = 1 << 20  # of a text file, read at a time
LONGEST_PIECE = 1 << 26  # characters without a place to cut; no text looks like that
LONGEST_GAP = 500_000  # characters of white space; tiktoken's engine gives up at more, fastokens does not
GAP = f"{LONGEST_GAP:,} characters of white space, or more"
LONE_SPACES = " \n\t"
NUL = "NUL bytes: no text, or not in UTF-8; convert it to UTF-8, or leave it out"
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
BYTE_ORDER_MARK = codecs.BOM_UTF8  # at the beginning of a file; it is no part of the text
HEAD_BYTES = 1 << 18  # of a file, which tell whether it is a text
BAD_SHARE, BAD_BYTES = 0.01, 16  # of a text's head, at most: more of both are no damage, but something else
EDGE_BYTES = 1 << 16  # searched for a cut at a time
EDGE = re.compile(rb"\S[ \n\t](?=\S)")


class NoText(NamedTuple):
    """A part of a file that is left out."""

    begin: int  # byte
    end: int
    reason: str


class Replaced:
    """Counts bytes that are not UTF-8, and become U+FFFD."""

    def __init__(self) -> None:
        self.bytes = 0
        codecs.register_error("replaced", self._replace)

    def _replace(self, error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        self.bytes += error.end - error.start
        return "\ufffd", error.end


def why_no_text(head: bytes) -> str | None:
    """Return why a file that begins with these bytes is no text in UTF-8, or None."""
    if head.startswith(WIDE_MARKS):
        return "UTF-16 or UTF-32: convert it to UTF-8"
    if _too_many(head.count(b"\0"), len(head)):
        return NUL
    replaced = Replaced()
    is_whole = len(head) < HEAD_BYTES  # otherwise its last character may be cut
    codecs.getincrementaldecoder("utf-8")(errors="replaced").decode(head, final=is_whole)
    if _too_many(replaced.bytes, len(head)):
        return f"{replaced.bytes:,} of its first {len(head):,} bytes are not UTF-8: convert it to UTF-8"
    return None


def _too_many(bad: int, length: int) -> bool:
    """Tell whether so many bad bytes of a head are no damage of a text; half of it are not, however short it is."""
    return bad > max(BAD_BYTES, BAD_SHARE * length) or 2 * bad >= length > 0


def text_pieces(stream: BinaryIO, begin: int, end: int, replaced: Replaced) -> Iterator[str | NoText]:
    """Yield what lies between two edges of a text file in pieces of about PIECE_BYTES.

    Raises EOFError where the file ends before.
    """
    stream.seek(begin)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replaced")
    text, start, position = "", begin, begin  # the text is that from byte `start` on
    dropped = 0  # characters before the text, without a place to cut
    while position < end:
        data = stream.read(min(PIECE_BYTES, end - position))
        if not data:
            raise EOFError
        position += len(data)
        known = max(1, len(text) - 1)  # no place before
        last = position == end
        text += decoder.decode(data, final=last)
        decoded = position - len(decoder.getstate()[0])
        if dropped + known > LONGEST_PIECE - 2 * PIECE_BYTES:  # the first place tells how long this has become
            cut = _first_cut(text, known, len(text) - (not last)) or (len(text) if last else 0)
            if dropped + (cut or len(text) - 2) > LONGEST_PIECE:
                if not cut:
                    dropped += len(text) - 2
                    text = text[-2:]
                    continue
                stop = decoded - len(text[cut:].encode())
                yield NoText(start, stop, f"more than {LONGEST_PIECE:,} characters without space or symbol")
                text, start, dropped, known = text[cut:], stop, 0, 1
        cut = len(text) if last else cut_position(text, known)
        if cut:
            yield from _without_damage(text[:cut], start)
            text = text[cut:]
            start = decoded - len(text.encode())


def edge(stream: BinaryIO, position: int, size: int) -> int:
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


def cut_position(text: str, known: int = 1) -> int:
    """Return the last position where the text can be cut without changing its GPT-2 tokens, or 0 for none.

    GPT-2's pattern matches letters, digits, other characters and white space in runs of their own. So no match spans
    the place before a lone white space, nor before a symbol (but for the apostrophe of "'s") that follows a letter.
    `known`: the first place that may be one.
    """
    return next((place for place in range(len(text) - 2, known - 1, -1) if _can_cut(text, place)), 0)


def gap_position(text: str, begin: int = 0) -> int | None:
    """Return a place after `begin` inside white space of LONGEST_GAP characters or more, or None."""
    for place in range(begin + LONGEST_GAP - 1, len(text), LONGEST_GAP):
        if text[place].isspace():
            before, after = text[place - LONGEST_GAP + 1 : place], text[place : place + LONGEST_GAP]
            if len(before) - len(before.rstrip()) + len(after) - len(after.lstrip()) >= LONGEST_GAP:
                return place
    return None


def _first_cut(text: str, begin: int, end: int) -> int:
    return next((place for place in range(max(1, begin), end) if _can_cut(text, place)), 0)


def _can_cut(text: str, place: int) -> bool:
    before, here, after = text[place - 1], text[place], text[place + 1 : place + 2]
    if here in LONE_SPACES:
        return not before.isspace() and not after.isspace()
    return here != "'" and before.isalpha() and unicodedata.category(here)[0] in "PS"


def _without_damage(text: str, start: int) -> Iterator[str | NoText]:
    """Yield what lies before, between and after gaps and NULs in a text that begins and ends where it can be cut."""
    done, gap, nul = 0, gap_position(text), text.find("\0")
    while gap is not None or nul >= 0:
        is_gap = gap is not None and not 0 <= nul < gap
        place = gap if is_gap and gap is not None else nul
        begin = next((cut for cut in range(place - 1, done, -1) if _can_cut(text, cut)), done)
        end = _first_cut(text, place, len(text)) or len(text)
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
