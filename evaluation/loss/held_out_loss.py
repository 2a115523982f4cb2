"""Held-out loss: nats per token, perplexity and bits per byte of unseen text, with standard errors.

A range of a token file is read in adjacent windows of the model's context length. The first token of the range is not
predicted, so `count` predictions need count + 1 tokens. The result has the same bits on any number of ranks, because
the batches do not depend on that number, each rank uses one thread on a CPU, and the losses are summed in order, in
fp64.
"""

import math
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

from common.errors import BadInput
from common.text import printable
from evaluation.command_line import LossCommand
from evaluation.loss.loss_measures import VALIDATION_RANGES, group_sums, stored_error
from evaluation.loss.token_losses import check_losses, range_losses
from evaluation.loss.token_range import Range, choose, is_certainly_unread, shared_documents
from evaluation.shared.load import Trained
from evaluation.shared.measuring import measure_each
from evaluation.shared.results import perplexity
from evaluation.shared.significance import plus_minus, stream_mean
from tokens.format.manifest import read_manifest
from tokens.format.token_file import TokenStream, open_split
from tokens.tokenizer.loading import is_recorded
from tokens.tokenizer.tokenizer import Tokenizer
from training.checkpoints.saved_state import SavedState, read_state
from training.parallel.process_group import Ranks

UNKNOWN_DATA = "; its training data are unknown"
OTHER_FILES = (
    "\n  It is unknown whether the run has read this text: the tokens are not in the files that it was trained and "
    "validated on, but those files may contain the same documents."
)
UNKNOWN_START = "\n  The run began with the weights of {source}, whose training data are unknown."


@attrs.frozen(kw_only=True)
class HeldOutLoss:
    """A model's loss on a range of tokens.

    Standard errors are over documents, because the tokens of a document are correlated. If neighboring documents are
    similar, `stored_error` enlarges the errors. Therefore, the value plus or minus about two errors is always a 95%
    interval.
    """

    tokens: int
    documents: int | None  # number of documents with tokens in the range; None if the tokenizer is unknown
    text_bytes: int | None  # None if the tokenizer is unknown
    nats_per_token: float
    nats_per_token_error: float | None  # None if there is a single document
    perplexity: float
    bits_per_byte: float | None
    bits_per_byte_error: float | None
    independent_documents: float | None = None  # number of independent documents that would give the same error
    groups: dict[str, list[float]]  # the sums that `group_sums` returns

    def __str__(self) -> str:
        parts = [f"{plus_minus(self.nats_per_token, self.nats_per_token_error, 4)} nats per token"]
        parts.append(f"perplexity {self.perplexity:,.2f}")
        if self.bits_per_byte is not None:
            parts.append(f"{plus_minus(self.bits_per_byte, self.bits_per_byte_error, 4)} bits per byte")
        documents = "" if self.documents is None else f", documents: {self.documents:,}"
        independent = None if self.independent_documents is None else round(self.independent_documents)
        if self.documents is not None and independent is not None and independent < self.documents:
            documents += f", equivalent to {independent:,} independent ones"
        return f"{', '.join(parts)}, over {self.tokens:,} tokens{documents}"


def run(command: LossCommand) -> None:
    measure_each(command, "loss", partial(choose, command), measure)


def measure(trained: Trained, chosen: tuple[Range, dict[str, Any]], ranks: Ranks) -> tuple[dict[str, Any], str]:
    """Return the model's loss, as fields to store and as text. Call this on every rank.

    Raises BadInput for tokens of another tokenizer, a range without text, or a loss that is not finite.
    """
    span, identity = chosen
    stream, tokenizer = open_split(span.directory, span.split), trained.known_tokenizer
    _check_tokenizer(trained, stream, span)
    targets = stream.read(span.start + 1, span.count)
    weights = np.empty(span.count, np.uint8)
    stream.read_weights_into(weights, span.start + 1)
    if not weights.any() or (tokenizer is not None and (targets == tokenizer.end_of_text_id).all()):
        raise BadInput(f"{span}: there is no text in this range; pass another --from or --count")
    losses = range_losses(trained, stream, span, ranks) * weights
    check_losses(trained, torch.from_numpy(losses))
    loss = summary(losses, targets, tokenizer, weights)
    return {"range": identity, **attrs.asdict(loss)}, f" {loss}{_training_note(trained, span)}"


def _training_note(trained: Trained, span: Range) -> str:
    """Return the text to print after the loss. It says what is known about the data that the model has seen.

    For a run, it explains why the loss differs from the one printed during training, which was measured on other
    tokens.
    """
    if not trained.location.is_lockstep_checkpoint:
        return UNKNOWN_DATA
    state = read_state(trained.location.path)
    origin = state.config.initial_weights
    start = "" if origin is None else UNKNOWN_START.format(source=printable(origin.source))
    if not is_certainly_unread(trained.location, span):
        return OTHER_FILES + start
    return _validation_note(trained, state, span) + start


def _validation_note(trained: Trained, state: SavedState, span: Range) -> str:
    """Return why the loss differs from the validation loss in training, or "" if it should not differ."""
    if state.position.validation_loss is None or span.name in VALIDATION_RANGES:
        return ""
    validation, length = state.config.train.validation, state.config.model.context_length
    begin, count = validation.start_val_token, validation.validation_sequences * length
    streams = state.config.validation_streams
    # With several validation datasets, the loss of the first one is recorded.
    dataset = f" of {printable(streams[0].directory)}" if len(streams) > 1 else ""
    tokenizer = trained.known_tokenizer
    end_of_text_id = None if tokenizer is None else tokenizer.end_of_text_id
    shared = "".join(
        f"\n  {line}" for line in shared_documents(streams[:1], (begin, begin + count), span, end_of_text_id)
    )
    return (
        f"\n  The validation during training used other tokens, {begin:,} to {begin + count:,}{dataset}, with a loss "
        f"of {state.position.validation_loss:.4f}.{shared}"
    )


def summary(losses: np.ndarray, targets: np.ndarray, tokenizer: Tokenizer | None, weights: np.ndarray) -> HeldOutLoss:
    """Return the means over targets, with standard errors over documents.

    `losses`, `targets` and `weights` have one entry per predicted token (count,). A weight of 0 excludes the target.
    """
    ends = np.flatnonzero(targets == tokenizer.end_of_text_id) + 1 if tokenizer else np.array([], np.int64)
    begins = np.unique(np.concatenate([[0], ends[ends < len(targets)]])).astype(np.int64)
    nats = np.add.reduceat(losses.astype(np.float64), begins)
    lengths = byte_lengths(tokenizer)[targets] if tokenizer else np.zeros(len(targets))
    counts, text_bytes = (np.add.reduceat(sizes, begins, dtype=np.float64) for sizes in (weights, lengths * weights))
    nats, counts, text_bytes = (sums[counts > 0] for sums in (nats, counts, text_bytes))
    loss = stream_mean(nats, counts)
    bits = stream_mean(nats / math.log(2), text_bytes) if tokenizer else None
    return HeldOutLoss(
        tokens=int(counts.sum()),
        documents=len(counts) if tokenizer else None,
        text_bytes=int(text_bytes.sum()) if tokenizer else None,
        nats_per_token=loss.value,
        nats_per_token_error=stored_error(loss, counts),
        perplexity=perplexity(loss.value),
        bits_per_byte=None if bits is None else bits.value,
        bits_per_byte_error=None if bits is None else stored_error(bits, text_bytes),
        independent_documents=None if tokenizer is None else loss.independent,
        groups=group_sums(nats, counts, text_bytes),
    )


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of bytes that each id stands for, int64 (vocabulary_size,). The end of text has 0 bytes."""
    lengths = np.zeros(tokenizer.vocabulary_size, np.int64)
    for token, number in tokenizer.coder.ranks.items():
        lengths[number] = len(token)
    return lengths


def _check_tokenizer(trained: Trained, stream: TokenStream, span: Range) -> None:
    """Raise BadInput for ids outside the vocabulary, and for tokens whose manifest names another tokenizer."""
    manifest, ours, ids = read_manifest(span.directory), trained.known_tokenizer, trained.network.config.vocab_size
    if manifest is not None and ours is not None:
        theirs = manifest.tokenizer
        shared = theirs.all_special_tokens  # the model may have more special tokens, which were added at the end
        added = len(ours.special_tokens) - len(shared)
        sizes = (theirs.vocabulary_size + added, theirs.end_of_text_id)
        if (
            sizes != (ours.vocabulary_size, ours.end_of_text_id)
            or not shared.items() <= ours.special_tokens.items()
            or not is_recorded(ours, theirs, span.directory)
        ):
            problem = f"its tokens are from tokenizer {theirs.name}, but {trained.location.path} uses {ours.name}"
            raise BadInput(f"{span.directory}: {problem}; prepare the text with {ours.name}")
    stream.check_ids(span.start, span.count + 1, min(ids, ours.vocabulary_size if ours else ids))
