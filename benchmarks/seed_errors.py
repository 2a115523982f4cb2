"""Coverage of the intervals that `compare` shows for scores without a judge: chrF over questions and seeds.

    python benchmarks/seed_errors.py [--families 2400]

All seeds of a model answer the same questions. More seeds therefore do not reduce the error that comes from the choice
of questions.
"""

import itertools

import bench  # imported first, because it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, generator, holds

from evaluation.instruct.reference_scores import read_results

LEVEL, QUESTION, ANSWER = 40.0, 20.0, 15.0  # points
DATA = {"file": "simulated", "sha256": "", "test": 0}


def main(*, families: int = FAMILIES) -> None:
    """Print a row for each cell."""
    rows = []
    for cell, (seeds, questions, deviation) in enumerate(itertools.product((1, 2, 3, 5), (30, 110), (0.5, 1.7, 6.0))):
        random = generator("chrF", cell)
        inside = 0
        for _ in range(families):
            seed_effects = deviation * random.standard_normal((seeds, 1)) * (seeds > 1)
            noise = ANSWER * random.standard_normal((seeds, questions))
            scores = LEVEL + QUESTION * random.standard_normal(questions) + seed_effects + noise
            means, errors = scores.mean(axis=1), scores.std(axis=1, ddof=1) / np.sqrt(questions)
            spread = float(means.std(ddof=1)) if seeds > 1 else None
            record = {
                "evaluation": "instruct",
                "model": "m",
                "data": DATA | {"test": questions},
                "seeds": [{"chrf_error": float(error), "reference_loss_error": None} for error in errors],
                "chrf": {"value": float(means.mean()), "spread": spread},
                "reference_loss": {"value": None, "spread": None},
            }
            [stored] = read_results(record)
            low, high = stored.measurements[0].bounds or (None, None)
            inside += holds(low, high, LEVEL)
        rows.append([f"{seeds} seeds, {questions} questions, {deviation:g} points", covered_text(inside, families)])
    print(bench.table(["seeds, questions, deviation of a seed", "covered"], rows))


if __name__ == "__main__":
    bench.run(main)
