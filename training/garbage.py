"""Python's collection of reference cycles: on all ranks after the same steps, and not in between.

Left to itself each rank collects when it has made enough objects, each at another time, and all wait for the one that
does. A full collection takes 0.2 s with all that torch has imported; karpathy/nanochat saw pauses of half a second.
"""

import gc

INTERVAL_STEPS = 1000


def collect_between_steps(steps: int) -> None:
    """Call it after each step of a process, `steps` counted from 1: the first one leaves what stays for good."""
    if steps == 1:
        gc.collect()
        gc.freeze()
        gc.disable()
    elif steps % INTERVAL_STEPS == 0:
        gc.collect()
