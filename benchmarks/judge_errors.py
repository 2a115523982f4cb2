"""Error rates of the judge's intervals: false differences, coverage of means, and planted differences that are found.

    python benchmarks/judge_errors.py [--families 2400]

A score is the sum of the question's level (deviation 20 points), the model's deviation on that question (12), the
deviation of the fine-tuning seed, and the noise of the single answer (15). Seeds deviate by 1.7, 6 or 10 points for all
models, or by 15 points for the first model and 2 points for the rest.
"""

import itertools

import bench  # imported first, because it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, holds, percent

from evaluation.shared.significance import two_way_intervals

QUESTION, OWN, ANSWER, LEVEL = 20.0, 12.0, 15.0, 50.0  # points
SEEDS = {"1.7": (1.7, 1.7), "6": (6.0, 6.0), "10": (10.0, 10.0), "15, others 2": (15.0, 2.0)}
PLANTED = (4.0, 6.0, 8.0)  # planted differences between the first two models, in true standard errors
PLANTED_SHARE = 4  # every fourth family has planted differences


def main(*, families: int = FAMILIES) -> None:
    """Print a row for each cell."""
    rows = []
    for cell, (models, seeds, questions, deviation) in enumerate(
        itertools.product((2, 3, 5), (2, 3), (110, 300, 500), SEEDS)
    ):
        random = generator("judge", cell)
        false = covered = families_with_bounds = 0
        means_covered, means = [0, 0], [0, 0]  # for the first model, and for all other models
        detected = [0] * len(PLANTED)
        first_deviation, other_deviation = SEEDS[deviation]
        seed_deviations = np.array([first_deviation, *[other_deviation] * (models - 1)])
        seed_variance = (first_deviation**2 + other_deviation**2) / seeds
        error = np.sqrt(seed_variance + 2 * (OWN**2 + ANSWER**2 / seeds) / questions)
        for family in range(families):
            scores = draw(random, seed_deviations, (models, seeds, questions))
            averages, differences = two_way_intervals(scores)
            false += any(difference.excludes_zero for difference in differences.values())
            for model, average in enumerate(averages):
                means_covered[model > 0] += holds(average.low, average.high, LEVEL)
                means[model > 0] += 1
            bounded = [
                difference
                for difference in differences.values()
                if difference.low is not None and difference.high is not None
            ]
            covered += bool(bounded) and all(holds(interval.low, interval.high, 0.0) for interval in bounded)
            families_with_bounds += bool(bounded)
            for number, errors in enumerate(PLANTED if family % PLANTED_SHARE == 0 else ()):
                scores[0] += errors * error
                detected[number] += two_way_intervals(scores)[1][0, 1].excludes_zero
                scores[0] -= errors * error
        name = f"{models} models, {seeds} seeds, {questions} questions, {deviation}"
        rows.append(
            [
                name,
                false_text(false, families),
                covered_text(covered, families_with_bounds),
                *(covered_text(count, number) for count, number in zip(means_covered, means, strict=True)),
                *(percent(count * PLANTED_SHARE / families) for count in detected),
            ]
        )
    columns = [
        "false in",
        "differences covered",
        "first mean",
        "other means",
        *(f"found at {errors:g} errors" for errors in PLANTED),
    ]
    print(bench.table(["cell", *columns], rows))


def draw(random: np.random.Generator, seed_deviations: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return scores (models, seeds, questions) of equally good models. `seed_deviations` has a value per model."""
    models, seeds, questions = shape
    return (
        LEVEL
        + QUESTION * random.standard_normal(questions)
        + OWN * random.standard_normal((models, 1, questions))
        + seed_deviations[:, None, None] * random.standard_normal((models, seeds, 1))
        + ANSWER * random.standard_normal(shape)
    )


if __name__ == "__main__":
    bench.run(main)
