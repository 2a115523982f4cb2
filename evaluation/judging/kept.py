"""Results of a judge in evaluations.jsonl: one for each judgement, none that says less than what is there."""

from pathlib import Path
from typing import Any

from evaluation.shared.results import append_result, as_read, results_of

OF_THE_SESSION = ("time", "usd", "usd_uncounted")  # what differs between results that say the same
SUBJECT = ("judge", "effort", "base_url", "questions", "orders", "seeds", "candidate")


def append_unless_superfluous(home: Path, model: str, values: dict[str, Any]) -> str | None:
    """Append a result to those of a model, or return why not: the newest one of this judgement says the same, or more.

    Raises BadInput where it cannot be written.
    """
    values = as_read(values)
    same = [result for result in results_of(home, model, "judge") if _subject(result) == _subject(values)]
    why = _superfluous(same[-1], values) if same else None
    if why is None:
        append_result(home, model, "judge", values)
    return why


def _superfluous(newest: dict[str, Any], values: dict[str, Any]) -> str | None:
    if all(newest.get(key) == value for key, value in values.items() if key not in OF_THE_SESSION):
        return f"that of {newest.get('time')} says the same"
    before, now = newest.get("left_out"), values["left_out"]
    if isinstance(before, int) and before < now:
        return f"that of {newest.get('time')} leaves out {before:,} prompts, this one {now:,}"
    return None


def _subject(result: dict[str, Any]) -> list[Any]:
    """Return what tells judgements apart, whatever they found."""
    panel = [candidate.get("model") for candidate in result.get("candidates", [])]
    return [panel, *(result.get(key) for key in SUBJECT)]
