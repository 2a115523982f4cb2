"""Scores of answers without a judge: exact matches, chrF, and the loss of the reference answers."""

import math

import attrs

from evaluation.shared.intervals import plus_minus
from evaluation.shared.records import Answers


@attrs.frozen(kw_only=True)
class FreeScores:
    """Means over questions; standard errors are None where there is one question."""

    exact: float  # share of answers that are the reference, 0 to 1
    chrf: float  # 0 to 100
    chrf_error: float | None
    reference_loss: float | None  # nats per token of the reference answer; None unless every answer carries it
    reference_loss_error: float | None


def free_scores(answers: Answers) -> FreeScores:
    """Return the scores of one model's answers.

    chrF is the F-score of character n-grams (Popović, "chrF: character n-gram F-score for automatic MT evaluation",
    2015), of each answer separately, by sacrebleu with its defaults. Surrounding white space is ignored.
    """
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    texts = [(answer.text.strip(), answer.record.output.strip()) for answer in answers.answers]
    chrf, chrf_error = _mean([metric.sentence_score(text, [reference]).score for text, reference in texts])
    losses = [answer.reference_loss for answer in answers.answers if answer.reference_loss is not None]
    loss, loss_error = _mean(losses) if len(losses) == len(texts) else (None, None)
    return FreeScores(
        exact=sum(text == reference for text, reference in texts) / len(texts),
        chrf=chrf,
        chrf_error=chrf_error,
        reference_loss=loss,
        reference_loss_error=loss_error,
    )


def describe(scores: FreeScores) -> str:
    """Return scores as text."""
    pairs = [("chrF", scores.chrf, scores.chrf_error)]
    if scores.reference_loss is not None:
        pairs.insert(0, ("loss of the reference answers", scores.reference_loss, scores.reference_loss_error))
    shown = [f"{name} {plus_minus(value, error, 4)}" for name, value, error in pairs]
    return ", ".join([*shown, f"{scores.exact:.1%} exact"])


def _mean(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error."""
    number = len(values)
    mean = math.fsum(values) / number
    if number == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1) / number)
