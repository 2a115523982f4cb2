"""Measures of held-out loss, in sums over groups of documents: difficulty common to two models cancels."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from evaluation.command_line import RangeName
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, StreamMean, ratio_freedom, stream_mean, student_interval

GROUPS = 256  # in one result, at most
# Degrees of freedom of a difference from which the usual level suffices for a verdict, if neighbours are alike. With
# fewer, their number is itself uncertain, and only a difference at STRICTER times the level is a verdict.
LEAST_FREEDOM = 8
STRICTER = 0.1


@attrs.frozen(kw_only=True)
class NamedRange:
    """A range of a hub dataset: tokens start + 1 .. start + count of the split are predicted."""

    dataset: str
    split: str
    start: int
    count: int


NAMED_RANGES: dict[RangeName, NamedRange] = {
    # The records of KellerJordan/modded-nanogpt are validated on it, in the tables of its README.
    "fineweb-val-10m": NamedRange(dataset="kjj0/fineweb10B-gpt2", split="validation", start=0, count=10_485_760),
    # gpjt/ddp-base-model-from-scratch compares its models on it.
    "gpjt-test": NamedRange(dataset="gpjt/fineweb-gpt2-tokens", split="validation", start=50_000_000, count=19_660_800),
}
VALIDATION_RANGES = ("fineweb-val-10m",)  # that runs are meant to validate on, and publish that loss
GPJT_RANGE = attrs.asdict(NAMED_RANGES["gpjt-test"])  # as stored results have it


@attrs.frozen(kw_only=True)
class LossSample:
    nats: np.ndarray  # float64 (groups,)
    tokens: np.ndarray  # float64 (groups,)
    is_gpjt_range: bool


def in_groups(nats: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray) -> dict[str, list[float]]:
    """Return sums of per-document values (documents,) over groups of consecutive whole documents; nats to a millionth.

    The groups' boundaries are the same for every model.
    """
    documents = len(nats)
    count = min(documents, GROUPS)
    begins = np.arange(count) * documents // count
    sums = [np.add.reduceat(values, begins) for values in (nats, tokens, text_bytes)]
    rounded = [round(value, 6) for value in sums[0].tolist()]
    return {"nats": rounded, "tokens": sums[1].astype(int).tolist(), "text_bytes": sums[2].astype(int).tolist()}


def loss_difference(a: list[LossSample], b: list[LossSample], confidence: float) -> Interval:
    """Compare group by group: the difficulty of a text, common to both models, cancels in their difference.

    The error counts that neighbouring groups are alike. If they are so alike over so long a part of the text that their
    number tells little, the interval is given at a stricter level, and only if zero is outside it. Otherwise it has no
    bounds, which `compare` reports as "cannot tell".
    """
    nats = [np.mean([sample.nats for sample in side], axis=0) for side in (a, b)]
    found = stream_mean(nats[0] - nats[1], a[0].tokens)
    if found.independent < len(nats[0]) and found.freedom < LEAST_FREEDOM:
        strict = student_interval(found.value, found.error, found.freedom, 1 - STRICTER * (1 - confidence))
        return strict if strict.excludes_zero else Interval(value=found.value)
    return student_interval(found.value, found.error, found.freedom, confidence)


HELD_OUT = Measure(
    name="held-out loss",
    unit="nats per token",
    higher_is_better=False,
    difference=loss_difference,
    published=Published(
        values={"OpenAI GPT-2 small": "3.500", "OpenAI GPT-2 medium": "3.231"},
        source="gilesthomas.com, 9 January 2026, part 30: loss on 19,660,800 tokens of FineWeb",
        comparable=lambda sample: sample.is_gpjt_range,
        otherwise="Published losses of OpenAI's GPT-2 are left out: they are nats a GPT-2 token of FineWeb, and here "
        "another text or tokenizer is measured.",
    ),
)
# On the same tokens: the same comparison.
BITS = Measure(name="bits/byte", unit="bits per byte", higher_is_better=False)


def stored_error(mean: StreamMean, sizes: np.ndarray) -> float | None:
    """Return the error to store and print: that of a reader who counts a degree of freedom for each unit of its size.

    So the value, plus and minus about two errors, is the 95 % interval, however few the degrees of freedom are.
    """
    return mean.error_for(ratio_freedom(sizes))


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    span, groups = record["range"], record["groups"]
    nats, tokens, text_bytes = np.array([groups["nats"], groups["tokens"], groups["text_bytes"]], np.float64)
    if (nats < 0).any() or (tokens <= 0).any() or (text_bytes < 0).any() or record["nats_per_token"] < 0:
        raise ValueError("groups: wanted nats and bytes from 0, and tokens above 0")
    errors = {key: record.get(f"{key}_error") for key in ("nats_per_token", "bits_per_byte")}
    if "independent_documents" not in record:  # stored when documents were taken as independent
        for key, values, sizes in (("nats_per_token", nats, tokens), ("bits_per_byte", nats / math.log(2), text_bytes)):
            if errors[key] is not None and (found := stream_mean(values, sizes)).independent < len(nats):
                errors[key] = stored_error(found, sizes)
    is_gpjt_range = all(span.get(key) == value for key, value in GPJT_RANGE.items())
    sample = LossSample(nats=nats, tokens=tokens, is_gpjt_range=is_gpjt_range)
    where, end = span.get("dataset") or Path(span["tokens"]).name, span["start"] + span["count"]
    measurements = [
        Measurement(
            measure=measure,
            value=record[key],
            error=errors[key],
            freedom=ratio_freedom(tokens),
            sample=sample,
        )
        for key, measure in (("nats_per_token", HELD_OUT), ("bits_per_byte", BITS))
        if record[key] is not None
    ]
    yield EvaluationResult.of(
        record,
        subject=f"{span['sha256']} {tokens.astype(int).tolist()}",  # groups of other documents have other sizes
        description=f"{span['split']} of {where}, tokens {span['start']:,} to {end:,}; ± is a standard error over "
        "documents, larger where neighbours are alike",
        measurements=measurements,
    )
