"""Extent: a part of one input file."""

import attrs


@attrs.frozen
class Extent:
    """A part of one input: bytes begin .. end, row groups begin .. end of a Parquet file, or all of a compressed one.

    Of text and JSON lines what begins in the range belongs to it; see `tokens.documents`.
    """

    input: int  # index
    begin: int
    end: int
