"""Tail split: held-out splits without documents are cut from the end of the train stream."""

import io

import numpy as np

from common.errors import BadInput
from tokens.prepare.commit_log import Totals
from tokens.prepare.growing_files import COPY_BYTES, GrowingStream
from tokens.prepare.plan import PrepareSettings

COPY_TOKENS = COPY_BYTES // 2


class TooFewDocuments(BadInput):
    """Too few documents to hold out: no command with these settings can finish."""


def missing_splits(settings: PrepareSettings, totals: Totals) -> dict[str, float]:
    """Return the held-out splits without tokens, with their shares of the documents."""
    return {split: share for split, share in settings.held_out.items() if not totals.tokens[split]}


def copy_tail(streams: dict[str, GrowingStream], settings: PrepareSettings, totals: Totals) -> dict[str, int]:
    """Copy the tail of the train stream to the missing splits; return the final length of each split.

    Whole documents; a single one is cut by tokens. Raises TooFewDocuments before anything is copied.
    """
    missing = missing_splits(settings, totals)
    documents, tokens = sum(totals.documents.values()), totals.tokens["train"]
    if tokens == 0:
        raise TooFewDocuments("every document's hash fell to a held-out split; add documents, or pass --split tail")
    whole = tokens if documents == 1 else documents
    held_out = {split: max(1, round(whole * share)) for split, share in missing.items()}
    if documents == 1:
        if sum(held_out.values()) >= tokens:
            raise TooFewDocuments(
                f"a single document of {tokens} tokens is too short to hold out {sum(held_out.values())} of them"
            )
    elif sum(held_out.values()) >= totals.documents["train"]:
        raise TooFewDocuments(
            f"{documents} documents are too few to hold out "
            f"{' and '.join(f'{count} for {split}' for split, count in held_out.items())}; add documents or lower "
            "the fractions"
        )
    lengths = dict(totals.tokens)
    train, end = streams["train"], tokens
    for split in reversed(held_out):  # the test split is the very end
        count = held_out[split]
        begin = end - count if documents == 1 else _before_documents(train, count, end, settings.end_of_text_id)
        for start in range(begin, end, COPY_TOKENS):
            streams[split].append(io.BytesIO(train.read(start, min(end, start + COPY_TOKENS)).tobytes()))
        streams[split].sync()
        lengths[split] = end - begin
        end = begin
    lengths["train"] = end
    return lengths


def _before_documents(train: GrowingStream, count: int, end: int, end_of_text_id: int) -> int:
    """Return the position of the last `count` documents of the train stream before `end`."""
    stop = end - 1  # end of text of the last one
    while stop > 0:
        begin = max(0, stop - COPY_TOKENS)
        found = np.flatnonzero(train.read(begin, stop) == end_of_text_id)
        if len(found) >= count:
            return begin + int(found[-count]) + 1
        count, stop = count - len(found), begin
    raise AssertionError("more documents than end-of-text ids")
