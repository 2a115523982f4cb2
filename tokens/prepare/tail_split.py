"""Tail split: held-out splits without documents are cut from the end of the train stream."""

import io

import numpy as np

from common.errors import BadInput
from tokens.prepare.commit_log import Totals
from tokens.prepare.growing_files import COPY_BYTES, GrowingStream
from tokens.prepare.plan import TAIL, PrepareSettings

COPY_TOKENS = COPY_BYTES // 2
MOST_TIMES = 10  # the share asked, of a held-out split, or less of train: beyond, whole documents split nothing
ADVICE = "add documents, or pass --split tail, which cuts the last one by tokens where it must"


class TooFewDocuments(BadInput):
    """Too few documents to hold out: no command with these settings can finish."""


def missing_splits(settings: PrepareSettings, totals: Totals) -> dict[str, float]:
    """Return the held-out splits without tokens, with their shares of the documents."""
    return {split: share for split, share in settings.held_out.items() if not totals.tokens[split]}


def copy_tail(streams: dict[str, GrowingStream], settings: PrepareSettings, totals: Totals) -> dict[str, int]:
    """Copy the tail of the train stream to the missing splits; return the final length of each split.

    Whole documents. A single one is cut by tokens; so is the last one of a tail split that would hold out far more than
    was asked. Raises TooFewDocuments before anything is copied.
    """
    if totals.tokens["train"] == 0:
        raise TooFewDocuments(f"every document's hash fell to a held-out split; {ADVICE}")
    train, old = streams["train"], settings.version == 1
    begins, problem = {}, None
    by_tokens = sum(totals.documents.values()) - totals.empty_documents == 1
    if not by_tokens:
        try:
            begins = _begins(train, settings, totals, by_tokens=False)
            problem = None if old else too_much_held_out(settings, _lengths(totals, begins))
        except TooFewDocuments as error:
            problem = str(error)
        by_tokens = problem is not None and settings.split == TAIL and not old
        if problem is not None and not by_tokens:
            raise TooFewDocuments(f"{problem}; {ADVICE}")
    if by_tokens:
        begins = _begins(train, settings, totals, by_tokens=True)
    end = totals.tokens["train"]
    for split, begin in begins.items():
        for start in range(begin, end, COPY_TOKENS):
            streams[split].append(io.BytesIO(train.read(start, min(end, start + COPY_TOKENS)).tobytes()))
        streams[split].sync()
        end = begin
    return _lengths(totals, begins)


def too_much_held_out(settings: PrepareSettings, lengths: dict[str, int]) -> str | None:
    """Return the problem of splits of such lengths, far from the shares that were asked, or None."""
    tokens, asked = sum(lengths.values()), settings.held_out
    for split, share in asked.items():
        if lengths[split] > MOST_TIMES * share * tokens:
            held_out = f"{lengths[split] / tokens:.1%} of the tokens, in whole documents"
            return f"--{split}-fraction {share:g} would hold out {held_out}"
    if MOST_TIMES * lengths["train"] < (1 - sum(asked.values())) * tokens:
        fractions = " and ".join(f"--{split}-fraction {share:g}" for split, share in asked.items())
        return f"{fractions} would leave {lengths['train']:,} of {tokens:,} tokens to train on"
    return None


def _begins(train: GrowingStream, settings: PrepareSettings, totals: Totals, *, by_tokens: bool) -> dict[str, int]:
    """Return where each missing split begins in the train stream, the last one first. Raises TooFewDocuments."""
    missing, end = missing_splits(settings, totals), totals.tokens["train"]
    documents = sum(totals.documents.values()) - totals.empty_documents
    text = _end_of_text(train, end, settings.end_of_text_id) if by_tokens else end
    whole, room = (text, text) if by_tokens else (documents, totals.documents["train"] - totals.empty_documents)
    counts = {split: max(1, round(whole * share)) for split, share in missing.items()}
    if missing and sum(counts.values()) >= room:
        what = f"text of {text:,} tokens is" if by_tokens else f"{documents} documents are"
        wanted = " and ".join(f"{count} for {split}" for split, count in counts.items())
        raise TooFewDocuments(f"{what} too few to hold out {wanted}")
    begins = {}
    for split in reversed(counts):  # the test split is the very end
        text = text - counts[split] if by_tokens else _before_documents(train, counts[split], text, settings)
        begins[split] = text
    return begins


def _lengths(totals: Totals, begins: dict[str, int]) -> dict[str, int]:
    lengths, end = dict(totals.tokens), totals.tokens["train"]
    for split, begin in begins.items():
        lengths[split], end = end - begin, begin
    return lengths | {"train": end}


def _before_documents(train: GrowingStream, count: int, end: int, settings: PrepareSettings) -> int:
    """Return the position of the last `count` documents of the train stream before `end`; empty ones do not count."""
    stop = end - 1  # end of text of the last one
    while stop > 0:
        begin = max(0, stop - COPY_TOKENS)
        is_end = train.read(begin, stop + 1) == settings.end_of_text_id
        found = np.flatnonzero(is_end[:-1] & ~is_end[1:] if settings.version > 1 else is_end[:-1])
        if len(found) >= count:
            return begin + int(found[-count]) + 1
        count, stop = count - len(found), begin
    raise AssertionError("more documents than end-of-text ids")


def _end_of_text(train: GrowingStream, end: int, end_of_text_id: int) -> int:
    """Return the end of the last document with text."""
    for stop in range(end, 0, -COPY_TOKENS):
        begin = max(0, stop - COPY_TOKENS)
        found = np.flatnonzero(train.read(begin, stop) != end_of_text_id)
        if len(found):
            return begin + int(found[-1]) + 2
    return end
