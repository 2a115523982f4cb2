"""Error rates of the judge's intervals: equal models called different, means that are covered, and planted differences.

    python benchmarks/judge_errors.py [--families 2400]

A score is the sum of the question's level (deviation 20 points), the model's own level on that question (12), a
deviation of the fine-tuning seed, and noise of the single answer (15). Seeds deviate by 1.7, 6 or 10 points for all
models, or by 15 for the first and by 2 for the others.
"""

import itertools

import bench  # first: it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, holds, percent

from evaluation.shared.significance import two_way_intervals

QUESTION, OWN, ANSWER, LEVEL = 20.0, 12.0, 15.0, 50.0  # points
SEEDS = {"1.7": (1.7, 1.7), "6": (6.0, 6.0), "10": (10.0, 10.0), "15, others 2": (15.0, 2.0)}
PLANTED = (4.0, 6.0, 8.0)  # true standard errors of the difference between the first model and the second
PLANTED_SHARE = 4  # one of so many families has a planted difference


def main(*, families: int = FAMILIES) -> None:
    """Print a row for each cell."""
    rows = []
    for cell, (models, seeds, questions, deviation) in enumerate(
        itertools.product((2, 3, 5), (2, 3), (110, 300, 500), SEEDS)
    ):
        random = generator("judge", cell)
        false = inside = given = 0
        means_inside, means = [0, 0], [0, 0]  # of the first model, and of all others
        found = [0] * len(PLANTED)
        first, others = SEEDS[deviation]
        of_seeds = np.array([first, *[others] * (models - 1)])
        error = np.sqrt((first**2 + others**2) / seeds + 2 * (OWN**2 + ANSWER**2 / seeds) / questions)
        for family in range(families):
            scores = draw(random, of_seeds, (models, seeds, questions))
            averages, differences = two_way_intervals(scores)
            false += any(one.excludes_zero for one in differences.values())
            for model, one in enumerate(averages):
                means_inside[model > 0] += holds(one.low, one.high, LEVEL)
                means[model > 0] += 1
            bounded = [one for one in differences.values() if one.low is not None and one.high is not None]
            inside += bool(bounded) and all(holds(one.low, one.high, 0.0) for one in bounded)
            given += bool(bounded)
            for number, errors in enumerate(PLANTED if family % PLANTED_SHARE == 0 else ()):
                scores[0] += errors * error
                found[number] += two_way_intervals(scores)[1][0, 1].excludes_zero
                scores[0] -= errors * error
        name = f"{models} models, {seeds} seeds, {questions} questions, {deviation}"
        rows.append(
            [
                name,
                false_text(false, families),
                covered_text(inside, given),
                *(covered_text(one, number) for one, number in zip(means_inside, means, strict=True)),
                *(percent(one * PLANTED_SHARE / families) for one in found),
            ]
        )
    columns = [
        "false in",
        "differences covered",
        "first mean",
        "other means",
        *(f"found at {one:g} errors" for one in PLANTED),
    ]
    print(bench.table(["cell", *columns], rows))


def draw(random: np.random.Generator, of_seeds: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return scores (models, seeds, questions) of models that are equally good."""
    models, seeds, questions = shape
    return (
        LEVEL
        + QUESTION * random.standard_normal(questions)
        + OWN * random.standard_normal((models, 1, questions))
        + of_seeds[:, None, None] * random.standard_normal((models, seeds, 1))
        + ANSWER * random.standard_normal(shape)
    )


if __name__ == "__main__":
    bench.run(main)
