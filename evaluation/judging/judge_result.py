"""Records of a judgement: its result in evaluations.jsonl, and the judge's comments as Markdown beside the answers."""

import hashlib
import json
import re
from typing import Any

import attrs

from common.errors import printable
from common.files import replace_file, writing
from evaluation.instruct.overlap import FreeScores
from evaluation.judging.judgement import Judgement, State
from evaluation.judging.panel import Panel
from evaluation.judging.scores import Scores
from evaluation.judging.verdict import Grade
from evaluation.shared.results import append_result, as_read, results_of
from training.telemetry.metrics_log import ANSWERS

Grades = list[list[Grade] | None]  # by prompt and position
OF_THE_SESSION = ("time", "usd", "usd_uncounted")  # fields that may differ between equal results
SUBJECT = ("judge", "effort", "base_url", "questions", "orders", "seeds", "candidate")


def keep_results(judgement: Judgement, states: list[State], scores: Scores, free: list[list[FreeScores]]) -> list[str]:
    """Append the result to those of every model that has a home; return lines for people.

    It is left out if the newest result of the same judgement is equal, or more complete. Raises BadInput.
    """
    shared = _shared_values(judgement, states, scores)
    lines = []
    for candidate, standing, seeds in zip(judgement.panel.candidates, scores.standings, free, strict=True):
        if candidate.home is None:
            continue
        own = {
            "candidate": standing.title,
            "score": attrs.asdict(standing.score),
            "free": list(map(attrs.asdict, seeds)),
        }
        values = as_read({**own, **shared})
        earlier = results_of(candidate.home, candidate.model, "judge")
        same = [old for old in earlier if _subject(old) == _subject(values)]
        superfluous = _superfluous(same[-1], values) if same else None
        if superfluous is None:
            append_result(candidate.home, candidate.model, "judge", values)
        else:
            lines.append(f"{candidate.title}: no result was added: {superfluous}")
    return lines


def keep_comments(judgement: Judgement, grades: Grades) -> list[str]:
    """Write the judge's comments beside the answers of every model that has a home; return lines for people.

    Raises BadInput.
    """
    panel, judge, options = judgement.panel, judgement.judge, judgement.options
    subject = [judge.effort, judge.base_url, _sha256(panel), panel.titles, options.orders, options.seed, panel.slots]
    digest = hashlib.sha256(json.dumps(subject).encode()).hexdigest()
    name = f"judged-by-{re.sub(r'[^A-Za-z0-9._-]+', '-', judge.model)[:80]}-{digest[:8]}.md"
    text = _comments(judgement, grades)
    lines = []
    for home in dict.fromkeys(candidate.home for candidate in panel.candidates if candidate.home is not None):
        path = home / ANSWERS / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
        lines.append(f"the judge's comments: {path}")
    return lines


def _shared_values(judgement: Judgement, states: list[State], scores: Scores) -> dict[str, Any]:
    panel, judge, cost = judgement.panel, judgement.judge, judgement.budget.cost
    priced = bool(judgement.budget.price.date)
    return {
        "judge": judge.model,
        "judge_snapshots": judgement.snapshots(),
        "effort": judge.effort,
        "base_url": judge.base_url,
        "questions": {"count": len(panel.questions), "sha256": _sha256(panel)},
        "orders": judgement.options.orders,
        "seeds": panel.slots,
        "anchor": scores.anchor,
        "doubtful": len(scores.doubtful),
        "position_bias": [value for value, _ in scores.bias],
        "disagreement": scores.disagreement,
        "candidates": [
            {"model": one.title, "score": one.score.value, "low": one.score.low, "high": one.score.high}
            for one in scores.standings
        ],
        "differences": [
            {"a": panel.titles[a], "b": panel.titles[b], **attrs.asdict(difference)}
            for (a, b), difference in scores.differences.items()
        ],
        "left_out": len(states) - states.count("judged"),
        "refused": states.count("refused"),
        "usd": cost.usd if priced else None,
        "usd_uncounted": cost.uncounted if priced else None,
    }


def _superfluous(newest: dict[str, Any], values: dict[str, Any]) -> str | None:
    """Return why a result adds nothing to the newest one; None if it does."""
    if all(newest.get(key) == value for key, value in values.items() if key not in OF_THE_SESSION):
        return f"that of {newest.get('time')} says the same"
    before, now = newest.get("left_out"), values["left_out"]
    if isinstance(before, int) and before < now:
        return f"that of {newest.get('time')} leaves out {before:,} prompts, this one {now:,}"
    return None


def _subject(result: dict[str, Any]) -> list[Any]:
    """Return what tells judgements apart, whatever their scores."""
    panel = [candidate.get("model") for candidate in result.get("candidates", [])]
    return [panel, *(result.get(key) for key in SUBJECT)]


def _sha256(panel: Panel) -> str:
    questions = [attrs.astuple(record) for record in panel.questions]
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()


def _comments(judgement: Judgement, verdicts: Grades) -> str:
    """Return every question with each answer to it, and that answer's scores and comments, one for each order."""
    panel = judgement.panel
    grades: dict[tuple[int, int, int], list[Grade]] = {}  # by question, seed, and number of the answer
    for prompt, verdict in zip(judgement.prompts, verdicts, strict=True):
        for answer, grade in zip(prompt.order, verdict or [], strict=verdict is not None):
            grades.setdefault((prompt.question, prompt.slot, answer), []).append(grade)
    lines = [f"# Comments of {printable(judgement.judge.model)}", ""]
    for question, record in enumerate(panel.questions):
        lines += [f"## {question + 1}. {printable(record.instruction)}", ""]
        lines += [*_quoted(record.input), ""] if record.input else []
        for slot in range(panel.slots):
            for answer, title in enumerate([*panel.titles, "reference"]):
                is_model = answer < len(panel.candidates)
                seed = f", seed {panel.candidates[answer].seeds[slot].seed}" if is_model else ""
                lines += [f"**{printable(title)}**{seed}", "", *_quoted(panel.text(question, slot, answer)), ""]
                said = grades.get((question, slot, answer), [])
                lines += [*(f"- {one.score:g}: {printable(one.comment)}" for one in said)] or ["- no verdict"]
                lines.append("")
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    return [f"> {printable(line)}".rstrip() for line in text.splitlines() or [""]]
