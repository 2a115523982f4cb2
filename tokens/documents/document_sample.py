"""Sample of documents: a limited number of bytes of text, from places that are spread evenly over the sources."""

from collections.abc import Iterator

import attrs

from tokens.documents.inputs import Extent
from tokens.documents.reader import Reader

PLACES = 256  # maximum number of places from which a sample is read


@attrs.define
class DocumentSample:
    """A sample of text that depends only on the units, their sizes and `most_bytes`.

    The text is read from several places. Each place is the beginning of a unit, and all places contribute equal shares.
    Small units are read first, and the unused parts of their shares go to the other places, so sources with less than
    `most_bytes` are read completely.
    """

    reader: Reader
    units: tuple[tuple[Extent, ...], ...]
    unit_bytes: tuple[int, ...]
    most_bytes: int
    documents: int = 0  # the last document read from each place may be truncated
    text_bytes: int = 0
    is_whole: bool = True  # the sources were read to their ends
    # Losses. The fields have the same names and meanings as in a manifest.
    problems: dict[str, int] = attrs.field(factory=dict)
    lost_documents: int = 0
    lost_bytes: int = 0
    examples: dict[str, list[str]] = attrs.field(factory=dict)

    def texts(self) -> Iterator[str]:
        """Yield the text in pieces. Also count documents, bytes and losses. Raises BadInput like `Reader.read`."""
        place_count = min(PLACES, len(self.units))
        chosen = [number * len(self.units) // place_count for number in range(place_count)]
        self.is_whole = place_count == len(self.units)
        for number, index in enumerate(sorted(chosen, key=lambda index: (self.unit_bytes[index], index))):
            bytes_left = (self.most_bytes - self.text_bytes) // (place_count - number)
            for piece in self.reader.read(self.units[index]):
                data = piece.text.encode()
                if len(data) > bytes_left:
                    self.is_whole, data = False, data[:bytes_left]
                bytes_left -= len(data)
                self.text_bytes += len(data)
                self.documents += piece.ends_document
                yield data.decode(errors="ignore")
                if not self.is_whole and not bytes_left:
                    break
        for name, value in self.reader.problems.summary().items():
            setattr(self, name, value)
