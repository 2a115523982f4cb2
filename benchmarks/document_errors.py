"""How often intervals of `loss` and winners of `compare` are wrong if neighboring documents are similar.

    python benchmarks/document_errors.py [--families 2400]

The first table has 100, 256 or 2,000 documents with lognormal lengths (deviation 0.8). Their mean losses have a
standard deviation of 0.4 nats and are correlated along the stream, as an AR(1) series. The second table has equal
recipes and 128 groups of documents. Each recipe deviates by 0.1 nats on each group, and neighboring groups have similar
deviations. Each seed deviates by 0.01 nats.
"""

import itertools
from pathlib import Path
from typing import Literal

import attrs
import bench  # imported first, because it makes the repository's modules importable
import numpy as np
from error_grid import FAMILIES, covered_text, false_text, generator, percent, series

from evaluation.comparison.rows import Row
from evaluation.comparison.winners import find_winners
from evaluation.loss.held_out_loss import summary
from evaluation.loss.loss_measures import HELD_OUT, LossSample, read_results
from evaluation.shared.results import EvaluationResult, Measurement
from tokens.tokenizer.loading import load_tokenizer

LOSS, DEVIATION = 3.5, 0.4  # mean and standard deviation of the documents' losses, in nats
SPREAD = 0.8  # standard deviation of the logarithm of a document's length
LENGTH = 20  # median number of tokens in a document
CORRELATIONS = (0.0, 0.5, 0.8, 0.95)
GROUPS, OWN, OF_SEED, OF_DOCUMENT = 128, 0.1, 0.01, 0.4
PLANTED, PLANTED_SHARE = 0.06, 4  # planted difference in nats; every fourth family has it
RANGE = {"tokens": "simulated", "split": "validation", "start": 0, "count": 1, "sha256": ""}


def main(part: Literal["loss", "compare", "both"] = "both", *, families: int = FAMILIES) -> None:
    """Print both tables, or one of them."""
    if part != "compare":
        rows = [
            [f"{documents:,} documents, correlation {correlation:g}", *losses(cell, documents, correlation, families)]
            for cell, (documents, correlation) in enumerate(itertools.product((100, 256, 2000), CORRELATIONS))
        ]
        print(bench.table(["interval of loss", "covered", "cannot tell", "half width"], rows), flush=True)
    if part != "loss":
        rows = [
            [
                f"{recipes} recipes, {seeds} seeds, {'lengths equal, ' * alike}correlation {correlation:g}",
                *winners(cell, families, alike, (recipes, seeds), correlation),
            ]
            for cell, (alike, recipes, seeds, correlation) in enumerate(
                itertools.product((False, True), (2, 3, 5), (2, 3), CORRELATIONS)
            )
        ]
        columns = ["false in", "cannot tell", f"{PLANTED:g} nats found", "cannot tell"]
        print("\n" + bench.table(["equal recipes", *columns], rows))


def losses(cell: int, documents: int, correlation: float, families: int) -> list[str]:
    """Return a row of the first table: how often the intervals for a model's loss contain it, and how wide they are."""
    random, tokenizer = generator("loss", cell), load_tokenizer("bytes")
    inside = intervals = 0
    widths = []
    for _ in range(families):
        lengths = 1 + np.ceil(LENGTH * np.exp(SPREAD * random.standard_normal(documents))).astype(int)
        levels = LOSS + DEVIATION * series(random, (documents,), correlation)
        targets = np.full(lengths.sum(), ord("a"))
        targets[np.cumsum(lengths) - 1] = tokenizer.end_of_text_id
        by_token = np.repeat(levels, lengths).astype(np.float32)
        record = attrs.asdict(summary(by_token, targets, tokenizer, np.ones(len(targets), np.uint8)))
        [stored] = read_results({"evaluation": "loss", "model": "m", "range": RANGE, **record})
        bounds = stored.measurements[0].bounds
        if bounds is not None:
            intervals += 1
            inside += bounds[0] <= LOSS <= bounds[1]
            widths.append((bounds[1] - bounds[0]) / 2)
    width = f"{np.median(widths):.4f}" if widths else ""
    return [covered_text(inside, intervals), percent(1 - intervals / families), width]


def winners(cell: int, families: int, alike: bool, counts: tuple[int, int], correlation: float) -> list[str]:
    """Return the cells for recipes that are compared with each other. `counts` has the numbers of recipes and seeds."""
    random, (recipes, seeds) = generator("compare", cell), counts
    false = undecided = detected = planted_undecided = 0
    for family in range(families):
        spread = SPREAD * (not alike)
        tokens = np.round(1000 * np.exp(spread * random.standard_normal(GROUPS)))
        hardness = LOSS + OF_DOCUMENT * series(random, (GROUPS,), correlation)
        recipe_effects = OWN * series(random, (recipes, 1, GROUPS), correlation)
        seed_effects = OF_SEED * random.standard_normal((recipes, seeds, 1))
        levels = hardness + recipe_effects + seed_effects  # (recipes, seeds, groups)
        lines = statements(levels, tokens)
        false += any(" better than " in line for line in lines)
        undecided += all("cannot tell" in line for line in lines)
        if family % PLANTED_SHARE:
            continue
        levels[0] -= PLANTED
        lines = statements(levels, tokens)
        detected += any(line.startswith("0.0") and " better than 1.0" in line for line in lines)
        planted_undecided += any(
            line.startswith("0.0") and " and 1.0" in line and "cannot tell" in line for line in lines
        )
    return [
        false_text(false, families),
        percent(undecided / families),
        percent(detected * PLANTED_SHARE / families),
        percent(planted_undecided * PLANTED_SHARE / families),
    ]


def statements(levels: np.ndarray, tokens: np.ndarray) -> list[str]:
    """Return the statement of `compare` about each pair of recipes.

    `levels` has the nats per token, (recipes, seeds, groups).
    """
    rows: list[Row] = []
    results: list[EvaluationResult | None] = []
    for recipe, seed in np.ndindex(levels.shape[:2]):
        nats = levels[recipe, seed] * tokens
        sample = LossSample(nats=nats, tokens=tokens, is_gpjt_range=False)
        measured = Measurement(measure=HELD_OUT, value=float(nats.sum() / tokens.sum()), sample=sample)
        record = {"evaluation": "loss", "model": f"{recipe}.{seed}", "time": ""}
        results.append(EvaluationResult.of(record, subject="s", description="", measurements=[measured]))
        label = f"{recipe}.{seed}"
        rows.append(Row(label=label, title=label, home=Path(label), results=[], recipe=str(recipe), seed=seed))
    lines = [statement.text for statement in find_winners(HELD_OUT, rows, results, None)[0]]
    return [line.removeprefix(f"{HELD_OUT.name}: ") for line in lines if "are runs of the same recipe" not in line]


if __name__ == "__main__":
    bench.run(main)
