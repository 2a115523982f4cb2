"""The key `measure` of a sweep: it measures all variants on the same held-out text, whatever tokens they train on.

If all variants use the tokenizer of the measured tokens, the loss is in nats per token. Otherwise the text is encoded
with each variant's own tokenizer, and the loss is in bits per byte.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors.numpy import save

from common.checks import KEY, checked, integer, number, optional, text
from common.errors import BadInput, refusing
from common.files import replace_file, writing
from common.text import quoted
from evaluation.loss.held_out_loss import measure as held_out_loss
from evaluation.loss.token_range import Range, choose_range
from evaluation.shared.load import load
from evaluation.shared.model_location import locate
from evaluation.shared.results import append_result, results_of
from evaluation.shared.weights import WeightsIdentity
from evaluation.shared.weights_on_disk import identity_of, identity_on_disk
from tokens.format.manifest import read_manifest
from tokens.format.token_file import open_split
from tokens.search.overlap import documents, find_overlap
from tokens.tokenizer.loading import gives_same_ids, recorded_tokenizer
from tokens.tokenizer.tokenizer import Tokenizer, token_dtype
from training.checkpoints.directory import name_of
from training.config.train_config import TrainConfig
from training.data.locate_tokens import locate_tokens
from training.parallel.process_group import Ranks
from training.telemetry.metrics_log import EVALUATIONS, GIVEN_TOKENIZER

MEASURED = "measured"  # folder next to the runs; it has the measured texts, encoded with the tokenizer of each run
# The measured text is looked up in the training tokens in sequences of this length: 13 GPT-2 tokens of English
SEQUENCE_BYTES = 56
# The training tokens may contain at most this share of the measured text. Common phrases occur in any similar text.
MOST_SEEN = 0.02


@attrs.frozen(kw_only=True)
class MeasuredRange:
    """One range of tokens in the key `measure` of a sweep file."""

    dataset: str = attrs.field(validator=text())
    split: str = attrs.field(default="validation", validator=text())
    start: int = attrs.field(default=0, validator=integer(0), metadata={KEY: "from"})
    count: int | None = attrs.field(default=None, validator=optional(integer(1)))
    weight: float = attrs.field(default=1.0, validator=number(0, above=True))  # weight in a run's mean loss


@attrs.frozen(kw_only=True)
class SharedMeasure:
    """Ranges of held-out tokens, with their weights in a run's loss."""

    ranges: tuple[Range, ...]
    shares: tuple[float, ...]
    same_ids: bool  # whether all variants have the tokenizer of the ranges; otherwise the loss is in bits per byte

    @property
    def unit(self) -> str:
        return "nats per token" if self.same_ids else "bits per byte"

    def mean(self, losses: Sequence[float]) -> float:
        """Return a run's loss: the weighted mean of its losses on all ranges."""
        return float(np.dot(self.shares, losses))


def read_measure(file: Path, value: Any, trains: Iterable[TrainConfig]) -> SharedMeasure | None:
    """Return the parsed value of the key `measure` in a sweep file, or None if the file does not have this key.

    `trains` are the configurations of the variants. Raise BadInput for an invalid key.
    """
    if value is None:
        return None
    with refusing(f"{file}: measure"):
        entries = [checked(MeasuredRange, entry) for entry in (value if isinstance(value, list) else [value])]
    if not entries:
        raise BadInput(f"{file}: measure: the list is empty; add at least one range")
    ranges = [choose_range(Path(entry.dataset), entry.split, entry.start, entry.count, []) for entry in entries]
    tokenizers = [tokenizer_of(directory) for directory in [*sources_of(trains), *(span.directory for span in ranges)]]
    total = sum(entry.weight for entry in entries)
    return SharedMeasure(
        ranges=tuple(ranges),
        shares=tuple(entry.weight / total for entry in entries),
        same_ids=all(gives_same_ids(tokenizers[0], tokenizer) for tokenizer in tokenizers[1:]),
    )


def check_unseen(measure: SharedMeasure, trains: Iterable[TrainConfig]) -> None:
    """Raise BadInput if a training source contains too much of the measured text. Common phrases are accepted."""
    for directory in sources_of(trains):
        tokenizer, stream = tokenizer_of(directory), open_split(directory, "train")
        for span in measure.ranges:
            texts = texts_of(span)
            if not texts:
                raise BadInput(f"{span}: contains no text to measure; choose another range")
            tokens = np.concatenate([tokenizer.encode(text) for text in texts])
            n = max(1, round(SEQUENCE_BYTES * len(tokens) / sum(len(text.encode()) for text in texts)))
            sequences = [[tokens[at : at + n]] for at in range(0, len(tokens) - n + 1, n)]
            share = float(find_overlap([stream], sequences, n).touched.mean()) if sequences else 0.0
            if share > MOST_SEEN:
                raise BadInput(
                    f"{directory}: its training tokens contain {share:.1%} of the measured text {span} (compared in "
                    f"sequences of {n} tokens), but at most {MOST_SEEN:.0%} is accepted; train on a different dataset, "
                    "or measure a different text"
                )


def measure_run(
    measure: SharedMeasure, run: Path, steps: int, train: TrainConfig, device: str | None
) -> list[float] | None:
    """Return the losses of a run's last checkpoint on all ranges.

    Losses that were measured on the same weights before are read from evaluations.jsonl. All other losses are measured
    on `device`. Older versions stored losses without a hash of the weights. Such losses are measured again, unless
    `device` is None. Return None if a loss is missing and `device` is None. Raise BadInput if a stored loss or the
    checkpoint is invalid.
    """
    title, trained, losses = f"{run.resolve().name} {name_of(steps)}", None, []
    weights = identity_on_disk(run, title)
    for span in measure.ranges if measure.same_ids else _encoded_ranges(measure, run, train):
        identity = span.identity()
        # Skip results measured with --tokenizer: in them, a token id may stand for a different text than in
        # the training tokens.
        loss_results = [line for line in results_of(run, title, "loss") if GIVEN_TOKENIZER not in line]
        stored = [line for line in loss_results if line.get("range") == identity]
        matching = [line for line in stored if weights is None or weights.is_same(WeightsIdentity.of(line))]
        if device is None or weights is None:  # nothing can be measured, so lines without a hash are used, too
            stored = matching or [line for line in stored if WeightsIdentity.of(line) is None]
        else:
            stored = matching
        if not stored and device is None:
            return None
        if not stored:
            alone = Ranks(rank=0, world_size=1, device=torch.device(str(device)), control=None, download=None)
            trained = trained or load(locate(str(run), name_of(steps)), None, alone.device)
            stored = [held_out_loss(trained, (span, identity), alone)[0]]
            append_result(run, title, "loss", stored[0], identity_of(trained.network, trained.location.path))
        losses.append(_loss_of(stored[-1], "nats_per_token" if measure.same_ids else "bits_per_byte", run))
    return losses


def _loss_of(result: dict[str, Any], key: str, run: Path) -> float:
    """Return the loss of a stored result.

    Raise BadInput if the loss is not a number of at least 0, because a verdict depends on the loss.
    """
    loss = result.get(key)
    if not number(0).holds(loss):
        raise BadInput(
            f"{run / EVALUATIONS}: {key}: got {quoted(loss)} in the last result on {result['range']['tokens']}, "
            "expected a number of at least 0; remove that line to measure the loss again"
        )
    return float(loss)  # type: ignore[arg-type]  # the check above shows that it is a number


def sources_of(trains: Iterable[TrainConfig]) -> list[Path]:
    """Return the directories of the tokens on which runs are trained."""
    return list(dict.fromkeys(location.directory for train in trains for location in locate_tokens(train, None)))


@cache
def tokenizer_of(directory: Path) -> Tokenizer:
    """Return the tokenizer of prepared tokens, which their manifest names. Raise BadInput if there is no manifest."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadInput(
            f"{directory}: no manifest.json, so the tokenizer is unknown; prepare the tokens with prepare_data.py"
        )
    return recorded_tokenizer(manifest.tokenizer, directory)


def texts_of(span: Range) -> list[str]:
    """Return the text of each document in a range. The first and the last document may be incomplete."""
    tokenizer, stream = tokenizer_of(span.directory), open_split(span.directory, span.split)
    cut_documents = documents(stream, tokenizer.end_of_text_id, span.start, span.count + 1)
    return [tokenizer.decode(tokens.tolist()) for (tokens,) in cut_documents]


def _encoded_ranges(measure: SharedMeasure, run: Path, train: TrainConfig) -> list[Range]:
    """Return the ranges, encoded with a run's tokenizer. Their tokens are written to the experiment's folder."""
    tokenizer, ranges = tokenizer_of(sources_of([train])[0]), []
    for span in measure.ranges:
        end = np.array([tokenizer.end_of_text_id])
        parts = [part for text in texts_of(span) for part in (end, tokenizer.encode(text))]
        tokens = np.concatenate(parts).astype(token_dtype(tokenizer.vocabulary_size))
        folder = run.parent / MEASURED / hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        # The folder is named after the hash of the tokens, so an existing file has the right content.
        if not (file := folder / "validation.safetensors").exists():
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(file, save({"tokens": tokens}))
        ranges.append(Range(directory=folder, split="validation", start=0, count=len(tokens) - 1))
    return ranges
