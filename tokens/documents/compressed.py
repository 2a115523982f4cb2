"""Lines of a gzip or Zstandard file, and the position up to which they are known to be good."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from tokens.documents.inputs import Damaged
from tokens.documents.text_file import Line, read_line

PACKED_BYTES = 1 << 17  # read at a time, at most: lost bytes are counted as exactly
ZSTANDARD_BYTES = 1 << 9  # decompressed at a time: 3 bytes may become 128 KiB, so at most 22 MiB come of them
LINES_BYTES = 1 << 20  # buffered, at most
CHECKSUMS = ("CRC", "Incorrect length", "checksum")  # in the libraries' messages


def decompressed_lines(stream: BinaryIO, *, zstandard: bool, longest: int) -> Iterator[Line]:
    """Yield the lines of a gzip or Zstandard file, as `read_line` gives them.

    Each with a position in the compressed file before its end, and 0: its compressed length is unknown. Raises Damaged.
    """
    from zstandard import ZstdError

    lines: Any = gzip.GzipFile(fileobj=stream)
    if zstandard:
        lines = io.BufferedReader(_ZstandardReader(stream), LINES_BYTES)
    try:
        while (line := read_line(lines, longest))[1]:
            yield line[0], max(0, stream.tell() - PACKED_BYTES), 0
    except (EOFError, zlib.error, gzip.BadGzipFile, ZstdError) as error:  # EOFError: a truncated gzip
        detail = f"{'not a Zstandard stream: ' if zstandard else ''}{error}"
        garbled = any(word in detail for word in CHECKSUMS)  # a wrong one at the end means damage anywhere before
        raise Damaged(f"{detail}; lines before it may be garbled" if garbled else detail) from error


class _ZstandardReader(io.RawIOBase):
    """Decompression frame by frame; unlike zstandard's own reader it notices a file that is cut short."""

    def __init__(self, stream: BinaryIO):
        import zstandard

        self._stream = stream
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new_frame()
        self._in_frame = False
        self._packed = self._lines = memoryview(b"")  # to be decompressed; to be read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._lines:
            if not self._packed:
                self._packed = memoryview(self._stream.read(PACKED_BYTES))
            if not self._packed:
                if self._in_frame:
                    raise Damaged("the Zstandard stream is cut short")
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            part = self._packed[:ZSTANDARD_BYTES]
            self._lines = memoryview(self._frame.decompress(part))
            self._packed = self._packed[len(part) - len(self._frame.unused_data) :]
            self._in_frame = not self._frame.eof
        count = min(len(buffer), len(self._lines))
        buffer[:count] = self._lines[:count]
        self._lines = self._lines[count:]
        return count
