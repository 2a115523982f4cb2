"""Packing: arrange a unit's conversations in rows of T tokens by best fit.

No conversation is divided. Rows are padded with end-of-text ids.
"""

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

# Number of tokens packed at a time (32 MiB). A unit may have more tokens, because a compressed file is one unit.
WINDOW_TOKENS = 1 << 23


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack items of the given lengths into rows by best fit, with the longest item first.

    Returns the indices of the items in each row, sorted. No length may exceed `room`.
    """
    # Rows, grouped by the number of tokens that still fit, and the sorted list of these numbers
    rows, rooms = defaultdict[int, list[list[int]]](list), list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        position, room_left, row = bisect.bisect_left(rooms, lengths[index]), room, list[int]()
        if position < len(rooms):
            room_left = rooms[position]
            row = rows[room_left].pop()
            if not rows[room_left]:
                del rooms[position]
        room_left -= lengths[index]
        if not rows[room_left]:
            bisect.insort(rooms, room_left)
        rows[room_left].append([*row, index])
    return sorted(sorted(row) for group in rows.values() for row in group)


class Packer:
    """Encodes a unit's conversations for one split, and collects them until they are packed into rows."""

    def __init__(self, settings: PrepareSettings, tokenizer: Tokenizer, write: Callable[..., None], problems: Problems):
        """`write` is called with the words of complete rows and, as keyword arguments, counts for the `UnitPart`."""
        assert settings.template is not None and settings.context_length is not None
        self._template = Template(settings.template)
        self._context_length = settings.context_length
        self._tokenizer = tokenizer
        self._write = write
        self._problems = problems
        self._waiting: list[np.ndarray] = []  # words of conversations that are not packed yet
        self._tokens = 0  # number of these words

    def add(self, pieces: list[Piece]) -> list[Piece]:
        """Add conversations, each with its end of text.

        Returns the conversations that the template accepts and that fit into a row.
        """
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
                detail = f"got {len(words):,} tokens, wanted at most {self._context_length:,} (--context-length)"
                self._problems.add("too long", piece.where, detail)
                continue
            self._waiting.append(words)
            self._tokens += len(words)
            added.append(piece)
            if self._tokens >= WINDOW_TOKENS:
                self.flush()
        return added

    def flush(self) -> None:
        """Write the collected conversations as rows."""
        rows = pack([len(words) for words in self._waiting], self._context_length)
        words = np.full((len(rows), self._context_length), self._tokenizer.end_of_text_id, GROWING_WORD)
        for number, row in enumerate(rows):
            packed = np.concatenate([self._waiting[index] for index in row])
            words[number, : len(packed)] = packed
        counts = {"counted": int((words >> COUNTED).sum()), "padding": words.size - self._tokens}
        self._write(words.reshape(-1), documents=len(self._waiting), **counts)
        self._waiting, self._tokens = [], 0
