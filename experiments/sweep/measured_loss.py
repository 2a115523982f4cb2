"""SharedMeasure of a sweep: the loss on held-out tokens that all variants share, whatever they are trained on.

Nats per token where all variants have the tokenizer of the measured tokens. Else bits per byte: the text of a
range is encoded with each variant's own tokenizer.
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

MEASURED = "measured"  # folder beside the runs: texts of the ranges in tokens of other tokenizers
SEQUENCE_BYTES = 56  # of text that is searched for in training tokens: 13 of GPT-2's tokens of English
MOST_SEEN = 0.02  # share of the measured text: phrases that stand in any text of a kind


@attrs.frozen(kw_only=True)
class MeasuredRange:
    """An entry of the key `measure`."""

    dataset: str = attrs.field(validator=text())
    split: str = attrs.field(default="validation", validator=text())
    start: int = attrs.field(default=0, validator=integer(0), metadata={KEY: "from"})
    count: int | None = attrs.field(default=None, validator=optional(integer(1)))
    weight: float = attrs.field(default=1.0, validator=number(0, above=True))  # in the loss of a run


@attrs.frozen(kw_only=True)
class SharedMeasure:
    """Ranges of held-out tokens, and their shares of a run's loss."""

    ranges: tuple[Range, ...]
    shares: tuple[float, ...]
    own_tokens: bool  # False: bits per byte of the text, in each variant's own tokens

    @property
    def unit(self) -> str:
        return "nats per token" if self.own_tokens else "bits per byte"

    def mean(self, losses: Sequence[float]) -> float:
        """Return a run's loss of those on all ranges."""
        return float(np.dot(self.shares, losses))


def read_measure(file: Path, value: Any, trains: Iterable[TrainConfig]) -> SharedMeasure | None:
    """Return the key `measure` of a sweep file whose variants train as `trains`; None without it. Raises BadInput."""
    if value is None:
        return None
    with refusing(f"{file}: measure"):
        entries = [checked(MeasuredRange, entry) for entry in (value if isinstance(value, list) else [value])]
    if not entries:
        raise BadInput(f"{file}: measure: got no range, wanted one, or a list")
    ranges = [choose_range(Path(one.dataset), one.split, one.start, one.count, []) for one in entries]
    tokenizers = [tokenizer_of(directory) for directory in [*sources_of(trains), *(span.directory for span in ranges)]]
    total = sum(one.weight for one in entries)
    return SharedMeasure(
        ranges=tuple(ranges),
        shares=tuple(one.weight / total for one in entries),
        own_tokens=all(gives_same_ids(tokenizers[0], one) for one in tokenizers[1:]),
    )


def check_unseen(measure: SharedMeasure, trains: Iterable[TrainConfig]) -> None:
    """Raise BadInput for a training source that holds more of the measured text than phrases in common."""
    for directory in sources_of(trains):
        tokenizer, stream = tokenizer_of(directory), open_split(directory, "train")
        for span in measure.ranges:
            texts = texts_of(span)
            if not texts:
                raise BadInput(f"{span}: holds no text")
            tokens = np.concatenate([tokenizer.encode(text) for text in texts])
            n = max(1, round(SEQUENCE_BYTES * len(tokens) / sum(len(text.encode()) for text in texts)))
            sequences = [[tokens[at : at + n]] for at in range(0, len(tokens) - n + 1, n)]
            share = float(find_overlap([stream], sequences, n).touched.mean()) if sequences else 0.0
            if share > MOST_SEEN:
                raise BadInput(
                    f"{directory}: {share:.1%} of what is measured, {span}, stands in its training tokens, in "
                    f"sequences of {n} tokens; wanted at most {MOST_SEEN:.0%}: leave it out, or measure other text"
                )


def measure_run(
    measure: SharedMeasure, run: Path, steps: int, train: TrainConfig, device: str | None
) -> list[float] | None:
    """Return the losses of a run's checkpoint on all ranges, measured on a device unless evaluations.jsonl has them.

    A stored loss counts for the weights that it was measured on. One without their hash, from an older version, is
    measured again where there is a device. None: a loss is missing, and there is no device. Raises BadInput.
    """
    title, trained, losses = f"{run.resolve().name} {name_of(steps)}", None, []
    now = identity_on_disk(run, title)
    for span in measure.ranges if measure.own_tokens else _own_ranges(measure, run, train):
        identity = span.identity()
        # A result under a tokenizer of --tokenizer is of other ids than the run was trained on.
        own = [one for one in results_of(run, title, "loss") if GIVEN_TOKENIZER not in one]
        stored = [one for one in own if one.get("range") == identity]
        known = [one for one in stored if now is None or now.is_same(WeightsIdentity.of(one))]
        if device is None or now is None:  # nothing can be measured: lines without a hash count, too
            stored = known or [one for one in stored if WeightsIdentity.of(one) is None]
        else:
            stored = known
        if not stored and device is None:
            return None
        if not stored:
            alone = Ranks(rank=0, world_size=1, device=torch.device(str(device)), control=None, download=None)
            trained = trained or load(locate(str(run), name_of(steps)), None, alone.device)
            stored = [held_out_loss(trained, (span, identity), alone)[0]]
            append_result(run, title, "loss", stored[0], identity_of(trained.network, trained.location.path))
        losses.append(_loss_of(stored[-1], "nats_per_token" if measure.own_tokens else "bits_per_byte", run))
    return losses


def _loss_of(result: dict[str, Any], key: str, run: Path) -> float:
    """Return the loss of a stored result. Raises BadInput where it is none: a verdict would follow from it."""
    loss = result.get(key)
    if not number(0).holds(loss):
        raise BadInput(
            f"{run / EVALUATIONS}: {key}: got {quoted(loss)}, wanted a number from 0 in the last result on "
            f"{result['range']['tokens']}; remove that line to measure it again"
        )
    return float(loss)  # type: ignore[arg-type]  # a number, as the check has found


def sources_of(trains: Iterable[TrainConfig]) -> list[Path]:
    """Return the token directories that runs are trained on."""
    return list(dict.fromkeys(location.directory for train in trains for location in locate_tokens(train, None)))


@cache
def tokenizer_of(directory: Path) -> Tokenizer:
    """Return the tokenizer of prepared tokens. Raises BadInput where no manifest names it."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadInput(f"{directory}: its tokenizer is not known: no manifest.json; prepare it with prepare_data.py")
    return recorded_tokenizer(manifest.tokenizer, directory)


def texts_of(span: Range) -> list[str]:
    """Return the text of a range by document; the first and the last may be cut."""
    tokenizer, stream = tokenizer_of(span.directory), open_split(span.directory, span.split)
    found = documents(stream, tokenizer.end_of_text_id, span.start, span.count + 1)
    return [tokenizer.decode(tokens.tolist()) for (tokens,) in found]


def _own_ranges(measure: SharedMeasure, run: Path, train: TrainConfig) -> list[Range]:
    """Return the text of the ranges in a run's tokens; it is written below the experiment's folder."""
    tokenizer, ranges = tokenizer_of(sources_of([train])[0]), []
    for span in measure.ranges:
        end = np.array([tokenizer.end_of_text_id])
        parts = [part for text in texts_of(span) for part in (end, tokenizer.encode(text))]
        tokens = np.concatenate(parts).astype(token_dtype(tokenizer.vocabulary_size))
        folder = run.parent / MEASURED / hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        if not (file := folder / "validation.safetensors").exists():  # its name is that of its content
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(file, save({"tokens": tokens}))
        ranges.append(Range(directory=folder, split="validation", start=0, count=len(tokens) - 1))
    return ranges
