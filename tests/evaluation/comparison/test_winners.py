"""If recipes differ, a winner is named. If only seeds or keys without an effect differ, a winner is hardly ever named.

The losses are simulated. A group of documents is equally hard for all models. In addition, each model has some noise on
each group, and each training seed has noise with a larger effect on the loss.
"""

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from evaluation.comparison.compare import Comparison, compare
from evaluation.comparison.rows import Row
from evaluation.comparison.winners import Group, Pair, seed_note, verdict
from evaluation.judging.scores import JUDGED
from evaluation.loss.loss_measures import HELD_OUT, LossSample
from evaluation.shared.results import Measure, Measurement
from evaluation.shared.significance import Interval, SeedNoise, student_quantile, two_way_intervals
from experiments.sweep.sweep_table import VariantResult, judge_variants
from tests.evaluation.comparison.stored import core, result, rows_of
from tests.evaluation.shared.test_significance import session

# SEED_NOISE is the standard deviation over seeds, and TEXT_NOISE the standard deviation of a model's loss on a group;
# both are in nats per token.
GROUPS, SEED_NOISE, TEXT_NOISE = 60, 0.01, 0.02
DEVIATION = float(np.hypot(SEED_NOISE, TEXT_NOISE / GROUPS**0.5))  # standard deviation of a measured loss over seeds
TOKENS = np.full(GROUPS, 1000.0)


def table(
    draw: np.random.Generator, seeds: list[int], shifts: list[float] | None = None, *, first_times: float = 1
) -> list[Row]:
    """Return models that were trained with several recipes.

    `seeds`: the number of seeds of each recipe; 0 stands for a single model whose recipe is unknown. `shifts`: the
    shift of each recipe's loss, in seed deviations. `first_times`: factor for the first recipe's seed noise.
    """
    hardness, rows, common = draw.normal(3.5, 0.5, GROUPS), [], draw.normal(0, 2 * SEED_NOISE, 99)
    for recipe, count in enumerate(seeds):
        noise = SEED_NOISE * (1 if recipe else first_times)
        for seed in range(max(1, count)):
            shift = DEVIATION * (shifts or [0.0] * len(seeds))[recipe] + common[seed] + draw.normal(0, noise)
            nats = (hardness + shift + draw.normal(0, TEXT_NOISE, GROUPS)) * TOKENS
            rows.append(model(f"{recipe}.{seed}", nats, str(recipe) if count else None, seed))
    return rows


def model(label: str, nats: np.ndarray, recipe: str | None, seed: int | None) -> Row:
    sample = LossSample(nats=nats, tokens=TOKENS, is_gpjt_range=False)
    loss = float(nats.sum() / TOKENS.sum())
    loss_result = result("loss", [Measurement(measure=HELD_OUT, value=loss, sample=sample)])
    return Row(label=label, title=label, home=Path(label), results=[loss_result], seed=seed, recipe=recipe)


def pair(measure: Measure, deviation: float | None = 1.0, **more: Any) -> Pair:
    """Return two models, a and b, for a verdict. If the deviation is None, the seed noise is unknown."""
    a, b = (Group(labels=[name], results={1: result("any", [], **more)}) for name in "ab")
    noise = None if deviation is None else SeedNoise(pooled=deviation, freedom=4)
    return Pair(measure=measure, groups=(a, b), noise=noise)


def winners(comparison: Comparison) -> list[str]:
    return [line for line in comparison.statements if " better than " in line]


@pytest.mark.parametrize(("seeds", "times"), [([3, 3], 1), ([2, 2, 2, 2], 1), ([5, 5, 5], 5), ([3, 1, 0], 5)], ids=str)
def test_equal_recipes_seldom_have_a_winner(seeds: list[int], times: float) -> None:
    draw = np.random.default_rng(len(seeds))
    tables = 300
    named = sum(bool(winners(compare(table(draw, seeds, first_times=times)))) for _ in range(tables))
    print(f"null, seeds {seeds}, the first of {times} deviations: a winner in {named} of {tables}")
    assert named <= (0.05 + 2 * (0.05 * 0.95 / tables) ** 0.5) * tables


def test_compare_agrees_with_a_sweep() -> None:
    draw, agreed = np.random.default_rng(2), []
    for _ in range(200):
        rows = table(draw, [3, 3], [0.0, 4.0])
        losses = [{row.seed: row.results[0].measurements[0].value for row in rows[at : at + 3]} for at in (0, 3)]
        base, variant = (VariantResult(name="", losses=recipe_losses) for recipe_losses in losses)
        [swept] = judge_variants(base, [variant], [0, 1, 2])
        agreed.append((swept.text.startswith("worse"), bool(winners(compare(rows)))))
    # The two commands do not always agree, because only `compare` takes into account that the text is a sample.
    assert np.mean([by_sweep == by_compare for by_sweep, by_compare in agreed]) > 0.9
    assert 0.4 < np.mean([by_sweep for by_sweep, _ in agreed]) < 0.7


def test_single_seeds_need_a_stated_deviation() -> None:
    draw = np.random.default_rng(0)
    tables = [table(draw, [1, 1, 0]) for _ in range(200)]
    comparisons = [compare(rows) for rows in tables]
    assert not any(map(winners, comparisons))
    shown = [
        line
        for comparison in comparisons
        for line in comparison.statements
        if "no winner: the seed noise is unknown" in line
    ]
    assert len(shown) > 300 and all("[" in line for line in shown)  # the interval ignores the seed noise
    advised = ["--seed-deviation" in " ".join(comparison.notes) for comparison in comparisons]
    assert advised == ["no winner" in " ".join(comparison.statements) for comparison in comparisons]
    assert not winners(compare(table(draw, [5, 1], [0, 20])))  # a single run says nothing about the seed noise
    brackets = [note for note in compare(table(draw, [3, 3, 3])).notes if note.startswith("Brackets: ")]
    assert "all intervals cover their differences is lower" in brackets[0]
    assert "Brackets" not in str(compare(table(draw, [1])).notes)
    independent = [table(draw, [1, 0, 0]) for _ in range(200)]
    deviation = float(np.hypot(DEVIATION, 2 * SEED_NOISE))
    assert sum(bool(winners(compare(rows, deviation))) for rows in independent) <= 0.08 * len(independent)
    apart = [table(draw, [1, 1, 0], [0, 20, 0]) for _ in range(50)]
    assert sum(len(winners(compare(rows, deviation))) == 2 for rows in apart) > 45


@pytest.mark.parametrize(("seeds", "shift"), [([5, 5], 3.0), ([5, 5, 5, 5], 4.0)], ids=["alone", "among four recipes"])
def test_five_seeds_detect_three_or_four_deviations(seeds: list[int], shift: float) -> None:
    draw = np.random.default_rng(1)
    tables, planted = 200, [0.0] * (len(seeds) - 1) + [shift]
    best, worse = "0.0, 0.1, 0.2, 2 more (5 seeds) are better than", f"than {len(seeds) - 1}.0,"
    detections = sum(
        any(best in line and worse in line for line in named)
        for named in (winners(compare(table(draw, seeds, planted))) for _ in range(tables))
    )
    print(f"planted, seeds {seeds}: found in {detections} of {tables}")
    assert detections >= 0.87 * tables


def test_the_spread_over_seeds_is_noted() -> None:
    measure = Measure(name="loss", digits=2)

    def group(*values: float) -> Group:
        results = [result("loss", [Measurement(measure=measure, value=value)]) for value in values]
        return Group(labels=[f"r{value:g}" for value in values], results=dict(enumerate(results)))

    assert seed_note(measure, [group(1, 3), group(5, 5, 8), group(9)]) == [
        "Seed noise, loss: r1, r3 (2 seeds) from 1.00 to 3.00; r5, r5, r8 (3 seeds) from 5.00 to 8.00; "
        "standard deviation 1.63 (degrees of freedom: 3)"
    ]
    assert seed_note(measure, [group(1), group(2)]) == []
    assert group(1, 2, 3, 4).name == "r1, r2, r3, r4 (4 seeds)"
    assert group(1, 2, 3, 4, 5).name == "r1, r2, r3, 2 more (5 seeds)"
    assert (group(1).name, group(1).verb, group(1, 2).verb) == ("r1", "is", "are")


def test_single_fine_tunings_have_no_winner() -> None:
    draw = np.random.default_rng(0)
    intervals = [two_way_intervals(session(draw, (2, 1, 110), seed_deviation=1.7))[1][0, 1] for _ in range(100)]
    assert sum(interval.excludes_zero for interval in intervals) > 7  # the intervals alone would name winners
    assert not any("is better" in verdict(pair(JUDGED, ranks_models=False), interval).text for interval in intervals)
    assert any("is better" in verdict(pair(JUDGED, ranks_models=True), interval).text for interval in intervals)
    alone = verdict(pair(HELD_OUT), Interval(value=-3, low=None, high=None)).text
    assert (
        alone == "a and b: cannot tell, because too little was measured to test the difference: -3.0000 nats per token"
    )


def test_text_and_seed_noise_are_combined(tmp_path: Path) -> None:
    counts = {"a": 60, "b": 66, "c": 84, "d": 92}  # hits among 200 items
    rows = rows_of(*(core(tmp_path / name, count, tasks=1) for name, count in counts.items()))
    rows = [
        attrs.evolve(row, recipe=recipe, seed=seed)
        for row, (recipe, seed) in zip(rows, [("r", 1), ("r", 2), ("s", 1), ("s", 2)], strict=True)
    ]
    value, squares = 0.125 / 0.75, (6 * 0.5**2 + 18 + 8 * 0.5**2) / 0.75**2
    # For the error, two items are added. On one of them, the models differ.
    more = (squares + 1 / 0.75**2) / 202 - (value * 200 / 202) ** 2
    text, seeds = (more / 202) ** 0.5, 0.005 / 0.75  # standard errors; the seeds' differences are 0.12 and 0.13
    criticals = student_quantile(0.975, 199), student_quantile(0.975, 1)
    reach = (criticals[0] * text**2 + criticals[1] * seeds**2) / math.hypot(text, seeds)
    line = f"c, d (2 seeds) are better than a, b (2 seeds) by {value:.4f} [{value - reach:.4f}, {value + reach:.4f}]"
    statements = compare(rows).statements
    assert f"CORE, part: {line} of the centered score" in statements
    assert "CORE, part: a, b (2 seeds) are runs of the same recipe: their difference is noise" in statements
