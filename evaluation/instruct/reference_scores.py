"""Scores of answers that need no judge: exact matches, chrF, and the loss of the reference answers."""

import json
import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from evaluation.shared.records import Answers
from evaluation.shared.results import EvaluationResult, Measure, Measurement
from evaluation.shared.significance import combined_error, mean_and_error, plus_minus

MEASURES = {  # by key in a stored result
    "chrf": Measure(name="chrF", digits=2),
    "reference_loss": Measure(name="reference loss", unit="nats per token", higher_is_better=False),
}


@attrs.frozen(kw_only=True)
class ReferenceScores:
    """Means over questions. The standard errors are None if there is a single question."""

    exact: float  # share of answers that are equal to the reference, 0 to 1
    chrf: float  # 0 to 100
    chrf_error: float | None
    reference_loss: float | None  # nats per token of the reference answer; None if any answer has no loss
    reference_loss_error: float | None

    def __str__(self) -> str:
        parts = [f"chrF {plus_minus(self.chrf, self.chrf_error, 4)}", f"{self.exact:.1%} exact"]
        if self.reference_loss is not None:
            loss = plus_minus(self.reference_loss, self.reference_loss_error, 4)
            parts.insert(0, f"loss of the reference answers {loss}")
        return ", ".join(parts)


def reference_scores(answers: Answers) -> ReferenceScores:
    """Return the scores of a model's answers.

    chrF is the F-score of character n-grams (Popović, "chrF: character n-gram F-score for automatic MT evaluation",
    2015). It is computed for each answer separately by sacrebleu with its defaults. Surrounding white space is ignored.
    """
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    texts = [(answer.text.strip(), [answer.record.output.strip()]) for answer in answers.answers]
    chrf, chrf_error = mean_and_error(np.array([metric.sentence_score(*pair).score for pair in texts]))
    losses = [answer.reference_loss for answer in answers.answers if answer.reference_loss is not None]
    loss, loss_error = mean_and_error(np.array(losses)) if len(losses) == len(texts) else (None, None)
    return ReferenceScores(
        exact=sum(text == reference for text, [reference] in texts) / len(texts),
        chrf=chrf,
        chrf_error=chrf_error,
        reference_loss=loss,
        reference_loss_error=loss_error,
    )


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    """Yield the result in a stored record.

    The result does not rank models: the scores of single questions are not stored, so models cannot be compared
    question by question.
    """
    data, settings = record["data"], record.get("settings", {})  # results with different settings are not comparable
    after = f", after {', '.join(f'{key} {value}' for key, value in settings.items())}" if settings else ""
    measurements = []
    for key, measure in MEASURES.items():
        if record[key]["value"] is not None:
            error, freedom = _error_over_seeds(record, key)
            measurements.append(Measurement(measure=measure, value=record[key]["value"], error=error, freedom=freedom))
    yield EvaluationResult.of(
        record,
        subject=f"{data['sha256']} {data['test']} {json.dumps(settings, sort_keys=True)}",
        description=f"{data['test']} questions of {data['file']}{after}; ± is a standard error over questions, and "
        "over fine-tuning seeds if there are several",
        measurements=measurements,
    )


def _error_over_seeds(record: dict[str, Any], key: str) -> tuple[float | None, float]:
    """Return the standard error of a mean over seeds and questions, and its degrees of freedom."""
    errors = [seed[f"{key}_error"] for seed in record["seeds"]]
    if not errors or None in errors:
        return None, math.inf
    # All seeds answer the same questions, so averaging over seeds does not reduce the error over questions.
    over_questions = math.fsum(errors) / len(errors)
    over_seeds = (record[key]["spread"] or 0) / math.sqrt(len(errors))
    return combined_error((over_questions, max(1, record["data"]["test"] - 1)), (over_seeds, max(1, len(errors) - 1)))
