"""Measures of fine-tuned answers that need no judge: chrF, and the loss of the reference answers.

Models are not ranked by them: scores of single questions are not stored, so differences cannot be paired.
"""

import math
from typing import Any

from evaluation.shared.measure import EvaluationResult, Measure, Measurement

MEASURES = {  # by the key of a stored result
    "chrf": Measure(name="chrF", digits=2),
    "reference_loss": Measure(name="reference loss", unit="nats per token", higher_is_better=False),
}


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    """Return a stored result of `evaluate.py instruct`."""
    data = record["data"]
    return [
        EvaluationResult(
            evaluation="instruct",
            model=record["model"],
            time=str(record.get("time")),
            subject=f"{data['sha256']} {data['test']}",
            description=f"{data['test']} questions of {data['file']}; ± is a standard error over questions, and over "
            "fine-tuning seeds where there are several",
            measurements=[
                Measurement(measure=measure, value=record[key]["value"], error=_error_over_seeds(record, key))
                for key, measure in MEASURES.items()
                if record[key]["value"] is not None
            ],
        )
    ]


def _error_over_seeds(record: dict[str, Any], key: str) -> float | None:
    """Return the standard error of a mean over seeds: that over questions, common to all seeds, and that over seeds."""
    errors = [seed[f"{key}_error"] for seed in record["seeds"]]
    if not errors or None in errors:
        return None
    over_questions = math.fsum(errors) / len(errors)  # of the same questions: averaging does not reduce it
    return math.hypot(over_questions, (record[key]["spread"] or 0) / math.sqrt(len(errors)))
