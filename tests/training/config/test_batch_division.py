"""Division of a global batch: micro-batches that occupy the ranks, and what is said of those that do not."""

import pytest

from tokens.batches.sampling import Layout
from training.config.batch_division import describe_balance, factors, microbatch_sizes


def test_microbatches_are_the_divisors_of_a_ranks_share() -> None:
    for ranks in (1, 2, 3):
        for batch in range(ranks, 60, ranks):
            sizes = [size for size in range(1, batch + 1) if batch % (size * ranks) == 0]
            assert microbatch_sizes(batch, ranks) == sizes
            assert microbatch_sizes(batch, ranks, 5) == [size for size in sizes if size <= 5]


def test_where_none_divides_microbatches_keep_the_ranks_busy() -> None:
    assert microbatch_sizes(128, 6) == [1, 2, 4, 8]  # 97, 97, 89 and 89 % of their time; with 16 67 %
    assert microbatch_sizes(8, 3) == [1]
    assert microbatch_sizes(8, 3, 1) == [1]
    assert microbatch_sizes(2, 3) == []


@pytest.mark.parametrize(
    ("ranks", "level", "said"),
    [
        (4, None, []),
        (
            6,
            None,
            [
                "8 micro-batches on 6 ranks: 2 at most, 67% of the ranks' time used; 4 ranks are as fast; with "
                "determinism elastic, gradient communication x1 of an even split; microbatch_size 1 would use 89%"
            ],
        ),
        (
            3,
            "elastic",
            [
                "8 micro-batches on 3 ranks: 3 at most, 89% of the ranks' time used; gradient "
                "communication x1.5 of an even split"
            ],
        ),
        (3, "off", ["8 micro-batches on 3 ranks: 3 at most, 89% of the ranks' time used"]),
    ],
)
def test_balance_and_cost_are_told(ranks: int, level: str | None, said: list[str]) -> None:
    layout = Layout(context_length=8, microbatch_size=2, microbatches=8, data_parallel_size=ranks)
    assert describe_balance(layout, level) == said


def test_factors_make_up_the_batch() -> None:
    even = Layout(context_length=8, microbatch_size=2, microbatches=8, data_parallel_size=4)
    uneven = Layout(context_length=8, microbatch_size=2, microbatches=8, data_parallel_size=6)
    assert factors(even) == "micro-batch 2 x accumulation 2 x world size 4"
    assert factors(uneven) == "8 micro-batches of 2 on world size 6"
