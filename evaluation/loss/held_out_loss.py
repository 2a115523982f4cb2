"""How well a model predicts text that it has not seen: nats a token, perplexity, bits a byte, each with its error.

A range of a token file is read in windows of the model's context, side by side; the first token of the range has no
prediction, so `count` predictions need count + 1 tokens. Batches are the same on any number of ranks, on a CPU each
rank has one thread, and losses are added up in their order, in fp64: the result has the same bits on any number of
ranks.
"""

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import BadInput
from common.files import sha256
from evaluation.loss.document_groups import Groups, in_groups
from evaluation.shared.intervals import plus_minus, ratio
from evaluation.shared.load import ModelLocation, Trained
from evaluation.shared.split_over_ranks import share
from model.gpt import GPT
from tokens.format.manifest import read_manifest
from tokens.format.token_file import TokenStream, open_split
from tokens.hub.download import hub_name
from tokens.prepare.growing_tokens import finished_by
from tokens.tokenizer.tokenizer import RANKS_FILE, Tokenizer, load_tokenizer
from training.checkpoints import directory as checkpoint
from training.checkpoints.compatibility import listed
from training.parallel.process_group import Ranks

FIRST_TOKEN, TOKENS = 50_000_000, 19_660_800  # the range on which gpjt/ddp-base-model-from-scratch compares its models
BATCH_TOKENS = 1 << 12  # in a forward pass; of GPT-2's vocabulary their logits are 0.8 GB


@attrs.frozen(kw_only=True)
class Range:
    """The tokens start + 1 .. start + count of a split, which are predicted."""

    directory: Path
    split: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"{self.directory}: {self.split}, tokens {self.start:,} to {self.start + self.count:,}"


@attrs.frozen(kw_only=True)
class HeldOutLoss:
    """What a model scores on a range. Standard errors are over documents, which differ more than their tokens do."""

    tokens: int
    documents: int  # that the range touches
    text_bytes: int
    nats_per_token: float
    nats_per_token_error: float | None  # None where there is one document
    perplexity: float
    bits_per_byte: float
    bits_per_byte_error: float | None
    groups: Groups


def token_directory(places: list[ModelLocation]) -> Path:
    """Return the token directory of the first run among models. Raises BadInput where it has none, or several."""
    known = next((place.record["token_files"] for place in places if "token_files" in place.record), None)
    if not isinstance(known, str):
        raise BadInput(f"{places[0].path}: does not tell one token directory; pass it with --tokens DIR")
    return Path(known)


def choose_range(
    directory: Path, split: str, start: int | None, count: int | None, places: list[ModelLocation]
) -> Range:
    """Return the range that is asked for; or gpjt's, capped to what is there; or what follows the validated tokens.

    That is in streams that end before gpjt's begins. Raises BadInput where nothing is left.
    """
    length = open_split(directory, split).length
    if start is None:
        start = FIRST_TOKEN
        if length <= FIRST_TOKEN + 1:
            seen = [part.end for place in places for part in _seen(place, directory, split)]
            start = max((end for end in seen if end < length), default=0)
    there = length - start - 1
    if there < 1 or (count is not None and count > there):
        wanted = "1 token" if count is None else f"{count:,} tokens"
        raise BadInput(
            f"{directory}: its {split} stream has {length:,} tokens, wanted {wanted} to predict after {start:,}; pass "
            "another --from or --count"
        )
    return Range(directory=directory, split=split, start=start, count=min(there, TOKENS if count is None else count))


def check_unseen(place: ModelLocation, span: Range) -> None:
    """Raise BadInput where the model was trained or validated on tokens of the range."""
    for part in _seen(place, span.directory, span.split):
        if part.begin < span.start + span.count + 1 and span.start < part.end:
            raise BadInput(
                f"{span}: {place.path} was {part.how} on tokens {part.begin:,} to {part.end:,} of it; pass another "
                "--from, --count or --split"
            )


def identity(span: Range) -> dict[str, Any]:
    """Return what tells a range from others, as JSON: where it lies, and the sha256 of its tokens as 32-bit numbers."""
    tokens = open_split(span.directory, span.split).read(span.start, span.count + 1)
    return {
        "tokens": str(span.directory),
        "dataset": hub_name(span.directory),
        "split": span.split,
        "start": span.start,
        "count": span.count,
        "sha256": hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest(),
    }


def measure(trained: Trained, span: Range, ranks: Ranks) -> HeldOutLoss:
    """Return the model's loss on a range; call it on every rank.

    Raises BadInput for tokens of another tokenizer, and for a loss that is not finite.
    """
    stream = open_split(span.directory, span.split)
    _check_tokenizer(trained, stream, span)
    targets = stream.read(span.start + 1, span.count)
    if (targets == trained.tokenizer.end_of_text_id).all():
        raise BadInput(f"{span}: holds no text; pass another --from or --count")
    losses = token_losses(trained, stream, span, ranks)
    if not np.isfinite(losses).all():
        raise BadInput(f"{trained.place.path}: its loss is not finite: the weights are damaged, or training diverged")
    return summary(losses, targets, trained.tokenizer)


def describe(result: HeldOutLoss) -> str:
    """Return a result for people."""
    nats = plus_minus(result.nats_per_token, result.nats_per_token_error, 4)
    bits = plus_minus(result.bits_per_byte, result.bits_per_byte_error, 4)
    documents = "1 document" if result.documents == 1 else f"{result.documents:,} documents"
    return (
        f"{nats} nats a token, perplexity {result.perplexity:,.2f}, {bits} bits a byte, over {result.tokens:,} tokens "
        f"of {documents}"
    )


def token_losses(trained: Trained, stream: TokenStream, span: Range, ranks: Ranks) -> np.ndarray:
    """Return the loss of each predicted token, nats, fp32 (count,), on every rank."""
    network, length = trained.network, trained.network.config.context_length
    starts = range(span.start, span.start + span.count, length)
    whole = span.count // length  # windows; one that is shorter may follow
    size = max(1, BATCH_TOKENS // length)
    batches = [starts[at : min(at + size, whole)] for at in range(0, whole, size)]
    batches += [starts[whole:]] if whole < len(starts) else []

    def losses(batch: range) -> np.ndarray:
        ends = [min(start + length, span.start + span.count) for start in batch]
        tokens = np.stack([stream.read(start, end - start + 1) for start, end in zip(batch, ends, strict=True)])
        ids = torch.from_numpy(tokens.astype(np.int64)).to(ranks.device)
        return prediction_losses(network, ids).flatten().cpu().numpy()

    return np.concatenate(share(ranks, batches, losses))


@torch.inference_mode()
def prediction_losses(network: GPT, tokens: Tensor) -> Tensor:
    """Return the loss of each token but the first of each row, nats, fp32 (B, T), of tokens (B, T + 1) int64."""
    logits = network(tokens[:, :-1])  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1)


def summary(losses: np.ndarray, targets: np.ndarray, tokenizer: Tokenizer) -> HeldOutLoss:
    """Return means and their standard errors from the loss of each target, both (count,).

    The errors take documents as the units.
    """
    ends = np.flatnonzero(targets == tokenizer.end_of_text_id) + 1
    begins = np.unique(np.concatenate([[0], ends[ends < len(targets)]])).astype(np.int64)
    nats = np.add.reduceat(losses.astype(np.float64), begins)
    counts = np.diff(np.append(begins, len(targets))).astype(np.float64)
    text_bytes = np.add.reduceat(byte_lengths(tokenizer)[targets], begins).astype(np.float64)
    mean, error = ratio(nats, counts)
    bits, bits_error = ratio(nats / math.log(2), text_bytes)
    return HeldOutLoss(
        tokens=len(targets),
        documents=len(begins),
        text_bytes=int(text_bytes.sum()),
        nats_per_token=mean,
        nats_per_token_error=error,
        perplexity=math.exp(mean),
        bits_per_byte=bits,
        bits_per_byte_error=bits_error,
        groups=in_groups(nats, counts, text_bytes),
    )


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Return how many bytes of text each id stands for, int64 (vocabulary_size,); the end of text for none."""
    lengths = np.zeros(tokenizer.vocabulary_size, np.int64)
    for token, number in tokenizer.ranks().items():
        lengths[number] = len(token)
    return lengths


@attrs.frozen
class _Seen:
    how: str
    begin: int
    end: int  # token behind the last one


def _seen(place: ModelLocation, directory: Path, split: str) -> list[_Seen]:
    """Return what of a stream a run has read; nothing where that is not known."""
    if not place.is_own:
        return []
    config = checkpoint.read_state(place.path)["config"]
    train, held_out = config["train"], config.get("validation_stream")
    length, streams = open_split(directory, split).length, listed(config.get("train_stream", []))
    sources = config.get("sources") or [{"tokens": None, "epochs": None}] * len(streams)  # of older versions: not known
    seen = []
    for stream, source in zip(streams, sources, strict=True):
        if source["tokens"] != 0 and _is_same(stream, "train", directory, split):
            begin = train["start_train_token"]
            # Shuffled windows may lie anywhere.
            everything = train["shuffle"] or source["epochs"] is None or source["epochs"] > 1
            seen.append(_Seen("trained", begin, length if everything else begin + source["tokens"] + 1))
    if held_out is not None and _is_same(held_out, "validation", directory, split):
        begin, windows = train["start_val_token"], train["validation_sequences"]
        seen.append(_Seen("validated", begin, begin + windows * config["model"]["context_length"] + 1))
    return seen


def _is_same(recorded: dict[str, Any], recorded_split: str, directory: Path, split: str) -> bool:
    """Tell whether a stream is the one of a run's record; while a run follows tokens, only their plan is known."""
    planned = (
        recorded_split == split and recorded.get("plan") is not None and recorded["plan"] == finished_by(directory)
    )
    return planned or recorded["sha256"] == _digests(directory, split)


@cache
def _digests(directory: Path, split: str) -> list[str]:
    """Return the sha256 of a stream's files, in order."""
    manifest = read_manifest(directory)
    paths = [file.path for file in open_split(directory, split).files]
    if manifest is not None and all(path.name in manifest.files for path in paths):
        return [manifest.files[path.name].sha256 for path in paths]
    return [sha256(path) for path in paths]


def _check_tokenizer(trained: Trained, stream: TokenStream, span: Range) -> None:
    """Raise BadInput for tokens that another tokenizer made, where that can be told."""
    manifest, ours = read_manifest(span.directory), trained.tokenizer
    if manifest is not None:
        theirs = manifest.tokenizer
        sizes = (theirs["vocabulary_size"], theirs["end_of_text_id"])
        ranks = span.directory / RANKS_FILE
        if sizes != (ours.vocabulary_size, ours.end_of_text_id) or (
            ranks.is_file() and load_tokenizer(str(ranks)).ranks() != ours.ranks()
        ):
            raise BadInput(
                f"{span.directory}: its tokens are of the tokenizer {theirs['name']}, those of {trained.place.path} of "
                f"{ours.name}; prepare the text with that one"
            )
    stream.check_ids(span.start, span.count + 1, ours.vocabulary_size)
