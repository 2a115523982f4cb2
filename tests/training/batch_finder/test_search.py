"""Search: every limit is found in few trials; candidates keep the global batch."""

import math
from collections.abc import Callable
from pathlib import Path

from training.batch_finder.search import candidates, keeping, next_candidate
from training.config.train_config import load_run


def test_a_search_decides_every_limit_in_few_trials(make_run: Callable[..., Path]) -> None:
    sizes = candidates(load_run(make_run(), ["global_batch_size=null"]).train, 2)
    for limit in (0, 1, 2, 30, 100, 333, 5000):
        for guess in (None, 1, 3, 100, 4000):
            fits, fails, trials = 0, math.inf, 0
            while (size := next_candidate(sizes, fits, fails, guess)) is not None:
                fits, fails, trials = (size, fails, trials + 1) if size <= limit else (fits, size, trials + 1)
            assert fits == max((size for size in sizes if size <= limit), default=0)
            assert trials <= (3 if limit == guess else 20), (limit, guess)


def test_candidates_keep_the_global_batch(make_run: Callable[..., Path]) -> None:
    train = load_run(make_run(global_batch_size=24), []).train
    assert candidates(train, 2) == [1, 2, 3, 4, 6, 12]
    assert keeping(train.batch, 2, 5) == 4
    alone = load_run(make_run("alone"), ["global_batch_size=null", "gradient_accumulation_steps=3"]).train
    assert keeping(alone.batch, 4, 5) == 3  # of 2 x 3
