"""Measure of the judge: a model's mean score, compared within one session, as that session found it."""

import json
from statistics import fmean
from typing import Any

import attrs

from evaluation.shared.intervals import Interval
from evaluation.shared.measure import EvaluationResult, Measure, Measurement, Published

SUBJECT = ("judge", "questions", "orders", "seeds", "differences")


@attrs.frozen(kw_only=True)
class JudgedCandidate:
    """One candidate of a session."""

    name: str  # in that session, which gives models of one title different ones
    differences: dict[tuple[str, str], Interval]  # a - b and b - a of all pairs of the session, by name


def judged_difference(a: list[JudgedCandidate], b: list[JudgedCandidate], _: float) -> Interval | None:
    """Return the session's own difference, whose intervals are simultaneous over all its pairs.

    Of several candidates a side it is the mean of their differences, with an interval as wide as theirs on average.
    """
    pairs = [one.differences.get((one.name, other.name)) for one in a for other in b]
    found = [pair for pair in pairs if pair is not None]
    bounds = [(pair.low, pair.high) for pair in found if pair.low is not None and pair.high is not None]
    if not found:
        return None
    value = fmean(pair.value for pair in found)
    if len(bounds) < len(found):
        return Interval(value=value)
    low, high = map(fmean, zip(*bounds, strict=True))
    return Interval(value=value, low=low, high=high)


JUDGED = Measure(
    name="judge's score",
    unit="points",
    digits=2,
    difference=judged_difference,
    published=Published(
        values={"OpenAI GPT-2 small": "22.98", "OpenAI GPT-2 medium": "38.53"},
        source="gilesthomas.com, 9 January 2026, part 30: score of another judge, in another session",
    ),
)


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    """Return a stored result of `evaluate.py judge`."""
    count, seeds, left_out = record["questions"]["count"], record["seeds"], int(record.get("left_out") or 0)
    missing = f", {left_out:,} prompts of which were left out for all models alike" if left_out else ""
    one_each = "questions only, of one fine-tuning each; instruct --seeds 2 or more tells more"
    covered = "questions and fine-tuning seeds" if seeds > 1 else one_each
    differences = {(entry["a"], entry["b"]): _interval(entry) for entry in record["differences"]}
    differences |= {(b, a): -difference for (a, b), difference in differences.items()}
    name = record.get("candidate", record["model"])  # older results have no name of their own
    candidate, score = JudgedCandidate(name=name, differences=differences), _interval(record["score"])
    return [
        EvaluationResult(
            evaluation="judge",
            model=record["model"],
            time=str(record.get("time")),
            subject=json.dumps([record[key] for key in SUBJECT]),
            description=f"{count} questions in one session of {record['judge']}{missing}; 95 % intervals over "
            f"{covered}",
            measurements=[Measurement(measure=JUDGED, value=score.value, interval=score, sample=candidate)],
            ranks_models=seeds > 1,
            left_out=left_out,
            session=record["judge"],
        )
    ]


def _interval(entry: dict[str, Any]) -> Interval:
    return Interval(value=entry["value"], low=entry.get("low"), high=entry.get("high"))
