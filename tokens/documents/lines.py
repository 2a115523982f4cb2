"""Lines of bounded length: a file without line ends, as a JSON array is, must not come into memory as a whole."""

from typing import IO

LONGEST_LINE = 1 << 26  # bytes
BLOCK_BYTES = 1 << 20


def read_line(stream: IO[bytes]) -> tuple[bytes | None, int]:
    """Return the next line, None for one that is longer than `LONGEST_LINE`, and its length; b"", 0 at the end."""
    line = stream.readline(LONGEST_LINE + 1)
    if len(line) <= LONGEST_LINE:
        return line, len(line)
    return None, len(line) + (0 if line.endswith(b"\n") else skip_line(stream))


def skip_line(stream: IO[bytes], most: int | None = None) -> int:
    """Go on behind the next line end, at most by so many bytes; return by how many."""
    skipped = 0
    while most is None or skipped < most:
        part = stream.readline(BLOCK_BYTES if most is None else min(BLOCK_BYTES, most - skipped))
        skipped += len(part)
        if not part or part.endswith(b"\n"):
            break
    return skipped
