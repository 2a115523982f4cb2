"""Training loop: the order of the work of a step, stops, and garbage collection between steps."""

import gc
import weakref

from training.loop import GARBAGE_INTERVAL_STEPS, collect_garbage


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_wait_for_the_step_that_collects_them() -> None:
    try:
        collect_garbage(1)
        knot = weakref.ref(Knot())
        kept = [[] for _ in range(100_000)]  # enough to have started a collection
        collect_garbage(GARBAGE_INTERVAL_STEPS - 1)
        assert knot() is not None and len(kept) == 100_000
        collect_garbage(GARBAGE_INTERVAL_STEPS)
        assert knot() is None
    finally:
        gc.enable()
        gc.unfreeze()
