"""Helpers: store results of models that were never trained, and run `evaluate.py compare`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.comparison.rows import Row, read_rows
from evaluation.core.bundle import LABELS
from evaluation.core.core_scores import task_score
from evaluation.shared.results import EvaluationResult, Measurement, append_result
from tests import launch
from tests.conftest import ROOT, one_line
from training.telemetry.metrics_log import WEIGHTS_FILE, WEIGHTS_VALUES

JUDGE = {"judge": "judge-1", "orders": 3, "seeds": 3, "questions": {"count": 110, "sha256": "q"}}
RANGE = {"tokens": "token_files/fineweb", "sha256": "s", "split": "validation", "start": 0, "count": 10}
DATA = {"file": "instructions.json", "sha256": "i", "train": 935, "validation": 55, "test": 110}


def evaluate(*arguments: str | Path, ranks: int = 1, environment: dict[str, str] | None = None) -> Any:
    """Run evaluate.py."""
    return launch.run(ROOT / "evaluate.py", *map(str, arguments), ranks=ranks, environment=environment)


def refused(*arguments: str | Path, ranks: int = 1, environment: dict[str, str] | None = None) -> str:
    """Return the error of evaluate.py, which must be a single line."""
    return one_line(evaluate(*arguments, "--device", "cpu", ranks=ranks, environment=environment))


def output_of(*arguments: str | Path, ranks: int = 1, environment: dict[str, str] | None = None) -> str:
    """Run a command of evaluate.py, which must succeed, and return its output."""
    done = evaluate(*arguments, ranks=ranks, environment=environment)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def compared(*arguments: str | Path, environment: dict[str, str] | None = None) -> str:
    """Return the output of `evaluate.py compare`."""
    return output_of("compare", *arguments, environment=environment)


def rows_of(*homes: Path) -> list[Row]:
    """Return the rows of the comparison for the models in these folders."""
    return read_rows(list(map(str, homes)))


def results(home: Path) -> list[dict[str, Any]]:
    """Return all stored results of a model."""
    return [json.loads(line) for line in (home / "evaluations.jsonl").read_text().splitlines()]


def newest_result(home: Path, kind: str = "loss") -> dict[str, Any]:
    """Return the newest stored result of an evaluation."""
    return [line for line in results(home) if line["evaluation"] == kind][-1]


def without_hash(line: dict[str, Any]) -> dict[str, Any]:
    """Return a stored result without the hashes of its weights, which older versions did not store."""
    return {key: value for key, value in line.items() if key not in (WEIGHTS_VALUES, WEIGHTS_FILE)}


def result(evaluation: str, measurements: list[Measurement], **more: Any) -> EvaluationResult:
    """Return a result of an unnamed model."""
    record = {"evaluation": evaluation, "model": "", "time": "2026"}
    return EvaluationResult.of(record, subject="s", description="", measurements=measurements, **more)


def write(home: Path, kind: str, **values: Any) -> Path:
    """Append a result to a folder. The model has the folder's name."""
    append_result(home, home.name, kind, values)
    return home


def losses_on(home: Path, **span: Any) -> Path:
    """Append a held-out loss to the results of a model."""
    scores = {
        "nats_per_token": 3.4,
        "bits_per_byte": 1.1,
        "groups": {"nats": [34.0], "tokens": [10], "text_bytes": [40]},
    }
    return write(home, "loss", range=RANGE | span, **scores)


def core(home: Path, right: int, bits: float = 1.0, *, tasks: int = 22, **data: Any) -> Path:
    """Append the CORE result of a model that is right on the first `right` of 200 items.

    The first two tasks share a file.
    """
    hits, gold_bits = np.arange(200) < right, bits + np.arange(200) / 1000
    scores = {LABELS[number]: task_score(f"{max(1, number)}.jsonl", 0.25, hits, gold_bits) for number in range(tasks)}
    return write(home, "core", data={"file": "runs/eval_bundle.zip", "sha256": "b", "count": None} | data, tasks=scores)


def judged(home: Path, score: list[float], differences: list[dict[str, Any]], **more: Any) -> Path:
    """Append a judge's score, and the differences between the judged models. `score`: the value, `low` and `high`."""
    value = dict(zip(("value", "low", "high"), score, strict=True))
    return write(home, "judge", **({"candidate": home.name} | JUDGE | more), score=value, differences=differences)


def instructed(home: Path, chrf: float, spread: float | None, errors: list[float | None]) -> Path:
    """Append a result of `evaluate.py instruct` to a model's results."""
    seeds = [{"chrf_error": error, "reference_loss_error": None} for error in errors]
    none = {"value": None, "spread": None}
    return write(home, "instruct", data=DATA, seeds=seeds, chrf={"value": chrf, "spread": spread}, reference_loss=none)
