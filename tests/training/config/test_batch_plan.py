"""Batch plan: steps, epochs, legal world sizes, and what is due when."""

import pytest

from training.config.batch_plan import count_due


@pytest.mark.parametrize(("checkpoint", "validation"), [(3, 4), (4, 4), (6, 4), (7, 100), (1, 5)])
def test_what_is_due_is_counted_without_walking_over_the_steps(checkpoint: int, validation: int) -> None:
    for last in range(1, 30):
        for first in range(1, last + 1):
            saves = [step for step in range(first, last + 1) if step % checkpoint == 0 or step == last]
            validations = [step for step in range(first, last + 1) if step % validation == 0 or step in saves]
            assert count_due(first, last, checkpoint) == len(saves)
            assert count_due(first, last, checkpoint, validation) == len(validations)
