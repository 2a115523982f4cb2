"""Lines of a gzip or Zstandard file, with the position up to which the file is known to be intact."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from tokens.documents.inputs import Damaged
from tokens.documents.text_file import Line, read_line

PACKED_BYTES = 1 << 17  # maximum number of compressed bytes read at a time; lost bytes are counted with this precision
ZSTANDARD_BYTES = 1 << 9  # compressed bytes per call; 3 of them can become 128 KiB, so the output is at most 22 MiB
LINES_BYTES = 1 << 20  # size of the buffer for decompressed bytes
CHECKSUMS = ("CRC", "Incorrect length", "checksum")  # words in the libraries' error messages


def decompressed_lines(stream: BinaryIO, *, zstandard: bool, longest: int) -> Iterator[Line]:
    """Yield the lines of a gzip or Zstandard file, as `read_line` returns them.

    The position of a line is a place in the compressed file before the end of the line. The length is 0, because the
    line's compressed length is unknown. Raises Damaged if the file is damaged.
    """
    from zstandard import ZstdError

    lines: Any = gzip.GzipFile(fileobj=stream)
    if zstandard:
        lines = io.BufferedReader(_ZstandardReader(stream), LINES_BYTES)
    try:
        while (line := read_line(lines, longest))[1]:
            yield line[0], max(0, stream.tell() - PACKED_BYTES), 0
    except (EOFError, zlib.error, gzip.BadGzipFile, ZstdError) as error:  # EOFError means a truncated gzip file
        detail = f"{'not a Zstandard stream: ' if zstandard else ''}{error}"
        # If the checksum at the end is wrong, anything before the checksum may be damaged.
        is_checksum_error = any(word in detail for word in CHECKSUMS)
        raise Damaged(f"{detail}; earlier lines may be wrong, too" if is_checksum_error else detail) from error


class _ZstandardReader(io.RawIOBase):
    """Decompresses one frame after another, and notices a truncated file, which zstandard's own reader does not."""

    def __init__(self, stream: BinaryIO):
        import zstandard

        self._stream = stream
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new_frame()
        self._in_frame = False
        self._packed = self._lines = memoryview(b"")  # compressed bytes to decompress; decompressed bytes to return

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._lines:
            if not self._packed:
                self._packed = memoryview(self._stream.read(PACKED_BYTES))
            if not self._packed:
                if self._in_frame:
                    raise Damaged("the Zstandard stream is truncated")
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
