"""Helpers: write answer files, run sessions of `evaluate.py judge` in this process, and read the sessions' results."""

import io
import json
import re
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs

import evaluate
from evaluation.judging.prompt import Candidate, Panel
from evaluation.judging.prompt import Judge as WhoIsAsked
from evaluation.judging.store import Reply, VerdictStore
from evaluation.shared.records import Answer, Answers, Record, write_answers
from tests.judge_server import Judge

QUESTIONS, ORDERS = 5, 3
PROMPTS = QUESTIONS * ORDERS
SESSION_KEYS = ("time", "base_url", "usd", "usd_uncounted")  # keys that may differ between equivalent sessions
PRICES = {
    "date": "2026-01-01",
    "usd_per_million_tokens": {"scripted": {"input": 100, "cached_input": 10, "output": 1000}},
}
SILENT = ("--effort", "none")
Result = dict[str, Any]  # a line of evaluations.jsonl
JUDGE = WhoIsAsked(model="gpt-5-mini", effort=None, base_url="http://here/v1")


def quality(prompt: dict[str, Any]) -> dict[str, int]:
    """Score each answer by the number at its end."""
    return {label: int(re.findall(r"\d+", text)[-1]) for label, text in prompt["answers"].items()}


def write(folder: Path, model: str, level: int, seed: int = 0, *, questions: range = range(QUESTIONS)) -> Path:
    """Write answers whose quality is about `level`. The quality of the references is 95."""
    settings = {"seed": seed, "epochs": 2, "losses": [2.0, 1.0 + seed], "best_epoch": seed}
    answers = [
        Answer(
            record=Record(instruction=f"Instruction {n}", input="", output=f"reference {n}: 95"),
            text=f"{model} says to {n}: {level + (7 * n + 3 * seed) % 5}",
            reference_loss=2.0 + n / 10,
        )
        for n in questions
    ]
    file = folder / model / "answers" / f"seed-{seed}.json"
    write_answers(file, Answers(model=model, seed=seed, home=None, settings=settings, answers=answers))
    return file


@attrs.frozen
class Sessions:
    """Sessions of `evaluate.py judge` that share a server, files of answers, and a store."""

    server: Judge
    files: list[Path]

    @property
    def folder(self) -> Path:
        return self.files[0].parents[2]

    @property
    def store(self) -> Path:
        return self.folder / "verdicts.jsonl"

    @property
    def results(self) -> Path:
        return self.files[0].parent.parent / "evaluations.jsonl"

    def command(self, *options: str, files: list[Path] | None = None) -> list[str]:
        usual = {"--model": "scripted", "--base-url": self.server.url, "--verdicts": str(self.store)}
        usual["--prices"] = str(self.folder / "prices.json")
        passed = {option.partition("=")[0] for option in options}
        fixed = [word for name, value in usual.items() if name not in passed for word in (name, value)]
        return ["judge", *map(str, files or self.files), *fixed, *options]

    def run(self, *options: str, files: list[Path] | None = None) -> Any:
        """Run evaluate.py to its end in this process."""
        return run(*self.command(*options, files=files))

    def said(self, *options: str, files: list[Path] | None = None) -> str:
        """Run a session, which must succeed, and return its output."""
        done = self.run(*options, files=files)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def result(self, number: int = 0) -> Result:
        return result(self.files[number])

    def replies(self) -> list[Reply]:
        return read_store(self.store).replies

    def unanswered(self) -> set[str]:
        """Return the ids of stored requests without an outcome."""
        return set(read_store(self.store).open)

    def check_paid_once(self, *, wrong: int = 0) -> None:
        """Check that every prompt has exactly one valid verdict, and that all billed replies are stored."""
        replies = self.replies()
        right = Counter(reply.key for reply in replies if reply.problem(3) is None)
        assert sorted(right.values()) == [1] * PROMPTS
        assert len(replies) == self.server.billed == PROMPTS + wrong


def sessions_in(folder: Path, server: Judge) -> Sessions:
    """Write prices, and answers of two models."""
    (folder / "prices.json").write_text(json.dumps(PRICES))
    return Sessions(server, [write(folder, "good", 60), write(folder, "poor", 40)])


def run(*arguments: str) -> Any:
    """Run evaluate.py to its end in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with patch("sys.argv", ["evaluate.py", *arguments]), redirect_stdout(output), redirect_stderr(errors):
        status = evaluate.main()
    return SimpleNamespace(returncode=status, stdout=output.getvalue(), stderr=errors.getvalue())


def result(file: Path) -> Result:
    """Return the newest judgment of a model, without the keys that may differ between equivalent sessions."""
    line = (file.parent.parent / "evaluations.jsonl").read_text().splitlines()[-1]
    return {key: value for key, value in json.loads(line).items() if key not in SESSION_KEYS}


def printed(output: str) -> float:
    return float(re.findall(r"including earlier sessions: (?:at most )?\$([\d.]+)", output)[-1])


def read_store(path: Path) -> VerdictStore:
    store = VerdictStore(path)
    store.close()
    return store


def panel(models: int, questions: int, slots: int = 1) -> Panel:
    records = [Record(instruction=f"do {n}", input="", output=f"right {n}") for n in range(questions)]

    def seed(model: int, slot: int) -> Answers:
        answers = [Answer(record=r, text=f"{model} {slot} {n}", reference_loss=None) for n, r in enumerate(records)]
        return Answers(model=f"m{model}", seed=slot, home=None, settings={}, answers=answers)

    candidates = [
        Candidate(title=f"m{m}", model=f"m{m}", home=None, seeds=[seed(m, slot) for slot in range(slots)])
        for m in range(models)
    ]
    return Panel(questions=records, candidates=candidates, slots=slots)
