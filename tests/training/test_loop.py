"""Reference cycles are collected after steps of our choosing, and not while a step runs."""

import gc
import weakref

from training.garbage import INTERVAL_STEPS, collect_between_steps


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_wait_for_the_step_that_collects_them() -> None:
    try:
        collect_between_steps(1)
        knot = weakref.ref(Knot())
        kept = [[] for _ in range(100_000)]  # enough to have started a collection
        collect_between_steps(INTERVAL_STEPS - 1)
        assert knot() is not None and len(kept) == 100_000
        collect_between_steps(INTERVAL_STEPS)
        assert knot() is None
    finally:
        gc.enable()
        gc.unfreeze()
