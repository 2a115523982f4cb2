"""What a judge has said of each answer: a file of Markdown beside the answers."""

import hashlib
import json
import re
from pathlib import Path

from common.errors import printable
from common.files import replace_file, writing
from evaluation.judging.candidates import Panel
from evaluation.judging.prompt import Grade, Prompt, read_grades
from training.telemetry.metrics_log import ANSWERS


def write_comments(home: Path, name: str, text: str) -> Path:
    """Write the comments of a judgement in place of those that it had before, and return the file. Raises BadInput."""
    path = home / ANSWERS / name
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    return path


def comments_name(judge: str, subject: object) -> str:
    """Return the name of a file of comments: of one judge there may be several, by what it was asked."""
    digest = hashlib.sha256(json.dumps(subject).encode()).hexdigest()
    return f"judged-by-{re.sub(r'[^A-Za-z0-9._-]+', '-', judge)[:80]}-{digest[:8]}.md"


def comments_text(panel: Panel, judge: str, prompts: list[Prompt], verdicts: list[str | None]) -> str:
    """Return every question, each answer to it, and its scores and comments, one for each order.

    `verdicts`: by prompt, the judge's text; None where it has given none.
    """
    said: dict[tuple[int, int, int], list[Grade]] = {}  # by question, seed, and number of the answer
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        if verdict is not None:
            for answer, grade in zip(prompt.order, read_grades(verdict, len(prompt.order)), strict=True):
                said.setdefault((prompt.question, prompt.slot, answer), []).append(grade)
    titles = [*(candidate.title for candidate in panel.candidates), "reference"]
    lines = [f"# Comments of {printable(judge)}", ""]
    for question, record in enumerate(panel.questions):
        lines += [f"## {question + 1}. {printable(record.instruction)}", ""]
        if record.input:
            lines += [*_quoted(record.input), ""]
        for slot in range(panel.slots):
            for answer, title in enumerate(titles):
                seed = f", seed {panel.candidates[answer].seeds[slot].seed}" if answer < len(titles) - 1 else ""
                lines += [f"**{printable(title)}**{seed}", "", *_quoted(panel.text(question, slot, answer)), ""]
                grades = said.get((question, slot, answer), [])
                lines += [f"- {grade.score:g}: {printable(grade.comment)}" for grade in grades] or ["- no verdict"]
                lines.append("")
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    return [f"> {printable(line)}".rstrip() for line in text.splitlines() or [""]]
