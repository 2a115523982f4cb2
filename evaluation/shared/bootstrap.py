"""Paired bootstrap: mean scores of models on the same questions, and simultaneous intervals of their differences.

Questions are resampled for all models together, so that a hard question is hard for every model; where models were
fine-tuned with several seeds, the seeds of each model are resampled separately (Owen, "The pigeonhole bootstrap",
Annals of Applied Statistics 1, 2007). Percentile intervals of small samples are too narrow (Hesterberg, "What Teachers
Should Know About the Bootstrap", American Statistician 69, 2015): each resample has one value less than the sample,
which makes its variance unbiased, and the percentiles are those at which a normal distribution has the tail of
Student's t. With several seeds the noise of single answers is counted twice: intervals are conservative. One seed
cannot be resampled: its intervals cover questions only, for that fine-tuning, and do not say which model is better.
"""

from statistics import NormalDist

import numpy as np

from evaluation.shared.significance import CONFIDENCE, Interval, student_quantile

DRAWS, CHUNK = 10_000, 1_000  # resamples in all, and in memory at once


def paired_intervals(scores: np.ndarray, *, seed: int = 0) -> tuple[list[Interval], dict[tuple[int, int], Interval]]:
    """Return each model's mean score, and the differences a - b of models a < b, with 95 % intervals.

    `scores`: float64 (M models, S seeds, Q questions), NaN where a question was not judged, which must be the same for
    all models: ValueError. Intervals of differences are simultaneous (Bonferroni), those of means are not. With fewer
    than ten questions they are too narrow: no resample lies beyond what was seen. `seed`: of the resampling.
    """
    judged = ~np.isnan(scores)
    if (judged != judged[0]).any() or not judged.any():
        raise ValueError("scores: wanted at least one judged question, and the same ones judged for all models")
    judged = judged[0]
    scores = scores[:, judged.any(1)][:, :, judged.any(0)]
    draws = _resampled_means(scores, np.random.default_rng(seed))
    values = np.nanmean(scores, axis=(1, 2))
    questions = scores.shape[2]
    means = [_percentiles(value, drawn, CONFIDENCE, questions) for value, drawn in zip(values, draws, strict=True)]
    pairs = [(a, b) for a in range(len(values)) for b in range(a + 1, len(values))]
    simultaneous = 1 - (1 - CONFIDENCE) / max(1, len(pairs))
    return means, {
        (a, b): _percentiles(values[a] - values[b], draws[a] - draws[b], simultaneous, questions) for a, b in pairs
    }


def _resampled_means(scores: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the mean of each model in each resample, float64 (M, DRAWS); NaN where nothing in it was judged."""
    models, seeds, questions = scores.shape
    judged = (~np.isnan(scores[0])).astype(np.float64)
    known = np.nan_to_num(scores)
    means = np.empty((models, DRAWS))
    for begin in range(0, DRAWS, CHUNK):
        of_questions = _counts(generator, questions)
        for model in range(models):
            of_seeds = _counts(generator, seeds)
            total = ((of_seeds @ known[model]) * of_questions).sum(1)
            weight = ((of_seeds @ judged) * of_questions).sum(1)
            means[model, begin : begin + CHUNK] = np.divide(total, weight, out=np.full(CHUNK, np.nan), where=weight > 0)
    return means


def _counts(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return how often each of `count` values is in a resample of count - 1, float64 (CHUNK, count); 1 if alone."""
    if count == 1:
        return np.ones((CHUNK, 1))
    drawn = generator.integers(count, size=(CHUNK, count - 1)) + count * np.arange(CHUNK)[:, None]
    return np.bincount(drawn.ravel(), minlength=CHUNK * count).reshape(CHUNK, count).astype(np.float64)


def _percentiles(value: float, draws: np.ndarray, confidence: float, questions: int) -> Interval:
    if questions == 1:
        return Interval(value=float(value))
    tail = NormalDist().cdf(-student_quantile((1 + confidence) / 2, questions - 1))
    low, high = np.nanquantile(draws, [tail, 1 - tail])
    return Interval(value=float(value), low=float(low), high=float(high))
