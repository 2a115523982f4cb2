"""Packing: conversations of a unit into rows of T tokens, whole, by best fit; the rest is end-of-text ids."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from common.errors import BadInput
from tokens.documents.inputs import Problems
from tokens.documents.reader import Piece
from tokens.prepare.plan import COUNTED, GROWING_WORD, PrepareSettings
from tokens.tokenizer.template import Template
from tokens.tokenizer.tokenizer import Tokenizer

WINDOW_TOKENS = 1 << 23  # packed at a time, 32 MiB: a compressed file is one unit, however large


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return rows of items by their indices, in their order: best fit, the longest first, `lengths` up to `room`."""
    rows, rooms = defaultdict[int, list[list[int]]](list), list[int]()  # by what they have left, and all such
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place, left, row = bisect.bisect_left(rooms, lengths[index]), room, list[int]()
        if place < len(rooms):
            left = rooms[place]
            row = rows[left].pop()
            if not rows[left]:
                del rooms[place]
        left -= lengths[index]
        if not rows[left]:
            bisect.insort(rooms, left)
        rows[left].append([*row, index])
    return sorted(sorted(row) for group in rows.values() for row in group)


class Packer:
    """Encoder of one split's conversations in a unit, which wait to be packed."""

    def __init__(self, settings: PrepareSettings, tokenizer: Tokenizer, write: Callable[..., None], problems: Problems):
        """`write`: takes the words of whole rows, and their counts as fields of a `UnitPart`."""
        assert settings.template is not None and settings.context_length is not None
        self._template = Template(settings.template)
        self._context_length = settings.context_length
        self._tokenizer = tokenizer
        self._write = write
        self._problems = problems
        self._waiting: list[np.ndarray] = []  # words
        self._tokens = 0  # of these

    def add(self, pieces: list[Piece]) -> list[Piece]:
        """Add conversations, each with its end of text, and return them: template and row length may refuse some."""
        added = []
        end = self._tokenizer.end_of_text_id
        for piece in pieces:
            try:
                ids, weights = self._template.encode(self._tokenizer, piece.messages)
            except BadInput as error:
                self._problems.add("cannot be encoded", piece.where, str(error))
                continue
            words = np.array(ids, GROWING_WORD) | np.array(weights, GROWING_WORD) << COUNTED
            words = words if ids[-1] == end else np.append(words, GROWING_WORD.type(end))
            if len(words) > self._context_length:
                detail = f"got {len(words):,} tokens, wanted {self._context_length:,} at most, the --context-length"
                self._problems.add("too long", piece.where, detail)
                continue
            self._waiting.append(words)
            self._tokens += len(words)
            added.append(piece)
            if self._tokens >= WINDOW_TOKENS:
                self.flush()
        return added

    def flush(self) -> None:
        """Write the waiting conversations as rows."""
        rows = pack([len(words) for words in self._waiting], self._context_length)
        words = np.full((len(rows), self._context_length), self._tokenizer.end_of_text_id, GROWING_WORD)
        for number, row in enumerate(rows):
            packed = np.concatenate([self._waiting[index] for index in row])
            words[number, : len(packed)] = packed
        counts = {"counted": int((words >> COUNTED).sum()), "padding": words.size - self._tokens}
        self._write(words.reshape(-1), documents=len(self._waiting), **counts)
        self._waiting, self._tokens = [], 0
