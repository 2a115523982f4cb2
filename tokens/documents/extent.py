"""Extent: a part of one input file."""

import attrs


@attrs.frozen
class Extent:
    """Bytes begin .. end of an input, row groups begin .. end of a Parquet file, or all of a compressed file.

    Lines and pieces of text that begin in the range belong to it; see tokens/documents/reader.py.
    """

    input: int  # index
    begin: int
    end: int
