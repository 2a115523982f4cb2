"""Sample of documents: text of at most some bytes, from places that are spread evenly over the sources."""

from collections.abc import Iterator

import attrs

from tokens.documents.inputs import Extent
from tokens.documents.reader import Reader

PLACES = 256  # that a sample is read from, at most


@attrs.define
class DocumentSample:
    """Text that is a function of the units, their sizes and `most_bytes` alone.

    A place is the beginning of a unit and gives an equal share. Small units come first, and the rest of their shares
    goes to the others, so that sources of less than `most_bytes` are read whole.
    """

    reader: Reader
    units: tuple[tuple[Extent, ...], ...]
    unit_bytes: tuple[int, ...]
    most_bytes: int
    documents: int = 0  # the last one of a place may be cut
    text_bytes: int = 0
    is_whole: bool = True  # the sources were read to their ends
    # Losses, as of a manifest.
    problems: dict[str, int] = attrs.field(factory=dict)
    lost_documents: int = 0
    lost_bytes: int = 0
    examples: dict[str, list[str]] = attrs.field(factory=dict)

    def texts(self) -> Iterator[str]:
        """Yield the text in pieces, and count it and the losses. Raises BadInput as `Reader.read`."""
        places = min(PLACES, len(self.units))
        chosen = [place * len(self.units) // places for place in range(places)]
        self.is_whole = places == len(self.units)
        for place, index in enumerate(sorted(chosen, key=lambda index: (self.unit_bytes[index], index))):
            left = (self.most_bytes - self.text_bytes) // (places - place)
            for piece in self.reader.read(self.units[index]):
                data = piece.text.encode()
                if len(data) > left:
                    self.is_whole, data = False, data[:left]
                left -= len(data)
                self.text_bytes += len(data)
                self.documents += piece.ends_document
                yield data.decode(errors="ignore")
                if not self.is_whole and not left:
                    break
        for name, value in self.reader.problems.summary().items():
            setattr(self, name, value)
