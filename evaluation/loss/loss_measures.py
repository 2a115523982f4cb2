"""The measures of held-out loss. Two models are compared by their sums over the same groups of documents.

The difficulty of a group is common to both models and cancels in their difference.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from evaluation.command_line import RangeName
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, StreamMean, ratio_freedom, stream_mean, student_interval

GROUPS = 256  # largest number of groups in a result
# If neighboring groups are correlated and there are fewer degrees of freedom than this, the significance level of a
# difference is multiplied by STRICTER, because such a small number of degrees of freedom is itself uncertain.
LEAST_FREEDOM = 8
STRICTER = 0.1


@attrs.frozen(kw_only=True)
class NamedRange:
    """A range of a dataset on the hub. The tokens from `start` + 1 to `start` + `count` of the split are predicted."""

    dataset: str
    split: str
    start: int
    count: int


NAMED_RANGES: dict[RangeName, NamedRange] = {
    # KellerJordan/modded-nanogpt measures its record runs on this range.
    "fineweb-val-10m": NamedRange(dataset="kjj0/fineweb10B-gpt2", split="validation", start=0, count=10_485_760),
    # gpjt/ddp-base-model-from-scratch compares its models on this range.
    "gpjt-test": NamedRange(dataset="gpjt/fineweb-gpt2-tokens", split="validation", start=50_000_000, count=19_660_800),
}
VALIDATION_RANGES = ("fineweb-val-10m",)  # losses on these ranges are published, but runs may also validate on them
GPJT_RANGE = attrs.asdict(NAMED_RANGES["gpjt-test"])  # in the form in which results store it


@attrs.frozen(kw_only=True)
class LossSample:
    """A result's sums over groups of documents. Models are compared by these sums."""

    nats: np.ndarray  # float64 (groups,)
    tokens: np.ndarray  # float64 (groups,)
    is_gpjt_range: bool


def group_sums(nats: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray) -> dict[str, list[float]]:
    """Return the sums of per-document values (documents,) over groups of consecutive documents.

    The boundaries of the groups are the same for every model. Nats are rounded to a millionth.
    """
    documents = len(nats)
    count = min(documents, GROUPS)
    begins = np.arange(count) * documents // count
    sums = [np.add.reduceat(values, begins) for values in (nats, tokens, text_bytes)]
    rounded = [round(value, 6) for value in sums[0].tolist()]
    return {"nats": rounded, "tokens": sums[1].astype(int).tolist(), "text_bytes": sums[2].astype(int).tolist()}


def loss_difference(a: list[LossSample], b: list[LossSample], confidence: float) -> Interval:
    """Return the difference between the mean losses of two lists of samples, compared group by group.

    The difficulty of a group is common to both models and cancels in their difference. The error accounts for the
    correlation of neighboring groups. If the correlation extends over so much of the text that too few degrees of
    freedom remain, the interval is computed at a stricter level. If even this interval excludes zero, it is returned;
    otherwise, the returned interval has no bounds, which `compare` reports as "cannot tell".
    """
    nats = [np.mean([sample.nats for sample in side], axis=0) for side in (a, b)]
    difference = stream_mean(nats[0] - nats[1], a[0].tokens)
    if difference.independent < len(nats[0]) and difference.freedom < LEAST_FREEDOM:
        strict = student_interval(
            difference.value, difference.error, difference.freedom, 1 - STRICTER * (1 - confidence)
        )
        return strict if strict.excludes_zero else Interval(value=difference.value)
    return student_interval(difference.value, difference.error, difference.freedom, confidence)


HELD_OUT = Measure(
    name="held-out loss",
    unit="nats per token",
    higher_is_better=False,
    difference=loss_difference,
    published=Published(
        values={"OpenAI GPT-2 small": "3.500", "OpenAI GPT-2 medium": "3.231"},
        source="gilesthomas.com, 9 January 2026, part 30: loss on 19,660,800 tokens of FineWeb",
        comparable=lambda sample: sample.is_gpjt_range,
        otherwise="Published losses of OpenAI's GPT-2 are left out: they are nats per GPT-2 token of FineWeb, but "
        "the models in this table were measured on another text or with another tokenizer.",
    ),
)
# This measure has no `difference`: on the same tokens, statements about it would repeat those about the loss.
BITS = Measure(name="bits/byte", unit="bits per byte", higher_is_better=False)


def stored_error(mean: StreamMean, sizes: np.ndarray) -> float | None:
    """Return the standard error to store and print.

    Readers of a result assume the degrees of freedom that follow from the number and sizes of the units, but there may
    be fewer if the units are correlated. The error is scaled to make up for that: the value plus or minus about two
    errors is still a 95% interval.
    """
    return mean.error_for(ratio_freedom(sizes))


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    """Yield the result in a stored record. If the record is damaged, raise an UNREADABLE exception."""
    span, groups = record["range"], record["groups"]
    nats, tokens, text_bytes = np.array([groups["nats"], groups["tokens"], groups["text_bytes"]], np.float64)
    if (nats < 0).any() or (tokens <= 0).any() or (text_bytes < 0).any() or record["nats_per_token"] < 0:
        raise ValueError("groups: wanted nats and bytes of at least 0, and tokens above 0")
    errors = {key: record.get(f"{key}_error") for key in ("nats_per_token", "bits_per_byte")}
    if "independent_documents" not in record:  # earlier versions treated documents as independent
        for key, values, sizes in (("nats_per_token", nats, tokens), ("bits_per_byte", nats / math.log(2), text_bytes)):
            if errors[key] is not None and (mean := stream_mean(values, sizes)).independent < len(nats):
                errors[key] = stored_error(mean, sizes)
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
        subject=f"{span['sha256']} {tokens.astype(int).tolist()}",  # the sizes identify the groups of documents
        description=f"{span['split']} of {where}, tokens {span['start']:,} to {end:,}; ± is a standard error over "
        "documents, which is larger if neighboring documents are similar",
        measurements=measurements,
    )
