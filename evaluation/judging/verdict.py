"""Verdict format: the JSON schema that a judge is sent, and a strict reader of what it returns."""

import re
import string
from typing import Any

import attrs

from common.errors import quoted
from common.json_files import parse_json

LABELS = string.ascii_uppercase
HIGHEST_SCORE = 100
FENCE = re.compile(r"```\w*\s*(.*)```", re.DOTALL)  # Markdown, with or without a language
NUMBER = re.compile(r" *\d{1,3}(\.\d{1,6})? *", re.ASCII)


@attrs.frozen(kw_only=True)
class Grade:
    """Score and comment of one answer."""

    score: float  # decimals are kept: only means are reported
    comment: str


def verdict_schema(answers: int) -> dict[str, Any]:
    """Return the JSON schema of a verdict on so many answers."""
    label = {"type": "string", "enum": list(LABELS[:answers])}
    grade = _object(label=label, comment={"type": "string"}, score={"type": "integer"})
    return _object(grades={"type": "array", "items": grade})


def read_grades(text: str, answers: int) -> list[Grade]:
    """Return the grades of a verdict by position. Raises ValueError saying what is wrong with it.

    Not every server enforces the schema: a Markdown fence around the object and numbers in strings are accepted.
    """
    fenced = FENCE.fullmatch(text.strip())
    try:
        value = parse_json(text if fenced is None else fenced[1], None)
    except ValueError as error:
        raise ValueError("not JSON, or cut off") from error
    try:
        rows = [(grade["label"], grade["score"], grade.get("comment")) for grade in value["grades"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("not of the schema") from error
    labels = [str(label) for label, _, _ in rows]
    if sorted(labels) != list(LABELS[:answers]):
        shown = ", ".join(labels)[:100]
        raise ValueError(f"labels {shown or 'none'}, wanted {', '.join(LABELS[:answers])} once each")
    grades = [Grade(score=_score(score, label), comment=str(comment or "")) for label, score, comment in rows]
    return [grade for _, grade in sorted(zip(labels, grades, strict=True), key=lambda pair: pair[0])]


def _score(value: Any, label: str) -> float:
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)
    if type(value) not in (int, float) or not 0 <= value <= HIGHEST_SCORE:
        raise ValueError(f"score {quoted(value)} of {label}, wanted a number from 0 to {HIGHEST_SCORE}")
    return value


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
