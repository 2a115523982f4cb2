"""A winner is named where recipes differ, and hardly ever where nothing but the seed, or a key without effect, does.

Simulated: losses over groups of documents that are hard for all models alike, with the noise of each model on each
group, and the noise of the training's seed, which is the larger.
"""

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from evaluation.comparison.compare import Comparison, compare
from evaluation.comparison.rows import Row
from evaluation.comparison.seed_noise import Group, SeedNoise
from evaluation.comparison.winners import Pair, verdict
from evaluation.judging.judge_result import JUDGED
from evaluation.loss.loss_measures import HELD_OUT, LossSample
from evaluation.shared import bootstrap
from evaluation.shared.bootstrap import paired_intervals
from evaluation.shared.measure import Measure, Measurement
from evaluation.shared.significance import Interval, student_quantile
from tests.evaluation.comparison.stored import hellaswag, result, rows_of
from tests.evaluation.shared.test_bootstrap import session

GROUPS, SEED_NOISE, TEXT_NOISE = 60, 0.01, 0.02  # nats per token; of text: of one model on one group of documents
DEVIATION = float(np.hypot(SEED_NOISE, TEXT_NOISE / GROUPS**0.5))  # of a loss as it is measured, over seeds
TOKENS = np.full(GROUPS, 1000.0)


def table(draw: np.random.Generator, seeds: list[int], shifts: list[float] | None = None) -> list[Row]:
    """Return models of recipes with so many seeds; 0 is one model of others, whose recipe is not known.

    `shifts`: of each recipe's loss, in seed deviations.
    """
    hardness, rows = draw.normal(3.5, 0.5, GROUPS), []
    for recipe, count in enumerate(seeds):
        for seed in range(max(1, count)):
            shift = DEVIATION * (shifts or [0.0] * len(seeds))[recipe] + draw.normal(0, SEED_NOISE)
            nats = (hardness + shift + draw.normal(0, TEXT_NOISE, GROUPS)) * TOKENS
            rows.append(model(f"{recipe}.{seed}", nats, str(recipe) if count else None, seed))
    return rows


def model(label: str, nats: np.ndarray, recipe: str | None, seed: int | None) -> Row:
    sample = LossSample(nats=nats, tokens=TOKENS, is_gpjt_range=False)
    loss = float(nats.sum() / TOKENS.sum())
    found = result("loss", [Measurement(measure=HELD_OUT, value=loss, sample=sample)])
    return Row(
        label=label, title=label, home=Path(label), results=[found], cost=None, validation_loss=None, seed=seed,
        recipe=recipe,
    )  # fmt: skip


def pair(measure: Measure, deviation: float | None = 1.0, **more: Any) -> Pair:
    """Return two models, a and b, for a verdict; a deviation of None: the seed noise is not known."""
    a, b = (Group(labels=[name], results=[result("any", [], **more)]) for name in "ab")
    noise = None if deviation is None else SeedNoise(deviation=deviation, freedom=4)
    return Pair(measure=measure, groups=(a, b), noise=noise)


def winners(found: Comparison) -> list[str]:
    return [line for line in found.statements if " better than " in line]


@pytest.mark.parametrize(
    "seeds",
    [[3, 3], [2, 2], [2, 1], [2, 2, 2, 2], [3, 1, 0, 0]],
    ids=lambda seeds: "-".join(map(str, seeds)),
)
def test_equal_recipes_have_a_winner_in_5_of_100_comparisons_at_most(seeds: list[int]) -> None:
    draw = np.random.default_rng(len(seeds))
    tables = 600
    named = sum(bool(winners(compare(table(draw, seeds)))) for _ in range(tables))
    print(f"null, seeds {seeds}: a winner in {named} of {tables}")
    assert named <= 0.05 * tables


def test_with_one_seed_a_side_nobody_wins_unless_the_seed_noise_is_stated() -> None:
    draw = np.random.default_rng(0)
    tables = [table(draw, [1, 1, 0]) for _ in range(400)]
    found = [compare(rows) for rows in tables]
    assert not any(map(winners, found))
    shown = [line for one in found for line in one.statements if "no winner: the seed noise is unknown" in line]
    assert len(shown) > 600 and all("[" in line for line in shown)  # seed noise is larger than the text's
    advised = ["--seed-deviation" in " ".join(one.notes) for one in found]
    assert advised == ["no winner" in " ".join(one.statements) for one in found]
    assert sum(bool(winners(compare(rows, DEVIATION))) for rows in tables) <= 0.05 * len(tables)
    apart = [table(draw, [1, 1, 0], [0, 10, 0]) for _ in range(100)]
    assert sum(len(winners(compare(rows, DEVIATION))) == 2 for rows in apart) > 95


@pytest.mark.parametrize("seeds", [[3, 3], [3, 3, 3, 3]], ids=["alone", "among four recipes"])
def test_four_seed_deviations_are_found_with_three_seeds_a_side(seeds: list[int]) -> None:
    draw = np.random.default_rng(1)
    tables, planted = 300, [0.0] * (len(seeds) - 1) + [4.0]
    found = sum(
        any("0.0, 0.1, 0.2 (3 seeds) are better than" in line and f"than {len(seeds) - 1}.0," in line for line in named)
        for named in (winners(compare(table(draw, seeds, planted))) for _ in range(tables))
    )
    print(f"planted, seeds {seeds}: found in {found} of {tables}")
    assert found >= 0.9 * tables


def test_equal_models_that_differ_by_fine_tuning_are_not_told_apart_by_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DRAWS", "CHUNK"):
        monkeypatch.setattr(bootstrap, name, 500)
    draw = np.random.default_rng(0)
    found = [paired_intervals(session(draw, (2, 1, 110), seed_deviation=1.7))[1][0, 1] for _ in range(100)]
    assert sum(one.apart for one in found) > 7  # the interval alone would
    assert not any("is better" in verdict(pair(JUDGED, ranks_models=False), one) for one in found)
    assert any("is better" in verdict(pair(JUDGED, ranks_models=True), one) for one in found)


def test_with_seed_noise_intervals_hold_for_all_pairs_of_recipes_together(tmp_path: Path) -> None:
    counts = {"a": 300, "b": 330, "c": 420, "d": 800}
    rows = rows_of(*(hellaswag(tmp_path / name, set(range(count))) for name, count in counts.items()))
    rows = [
        attrs.evolve(row, recipe=recipe, seed=seed)
        for row, (recipe, seed) in zip(rows, [("r", 1), ("r", 2), ("s", 1), (None, None)], strict=True)
    ]
    found = compare(rows).statements
    # Of three pairs one is found to differ or none is: c and a with b by their mean, 0.105
    confidence, value, square = 1 - 0.05 / 3, 0.105, (30 * 0.5**2 + 90 + 1) / 1002
    text = student_quantile((1 + confidence) / 2, 999) * ((square - (105 / 1002) ** 2) / 1001) ** 0.5
    seeds = student_quantile((1 + confidence) / 2, 1) * 0.03 / 2**0.5 * 1.5**0.5
    reach = math.hypot(text, seeds)
    bounds = f"[{-value - reach:.4f}, {-value + reach:.4f}]"
    line = f"a, b (2 seeds) and c do not differ significantly: -0.1050 {bounds} of all items"
    assert f"HellaSwag, completion: {line}" in found
    assert "HellaSwag, completion: a, b (2 seeds) are runs of one recipe: their difference is noise" in found


def test_without_an_interval_nobody_is_better() -> None:
    alone = verdict(pair(HELD_OUT), Interval(value=-3, low=None, high=None))
    assert alone == "a and b: cannot tell, for too little was measured to test the difference: -3.0000 nats per token"
