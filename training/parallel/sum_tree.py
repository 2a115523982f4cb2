"""Shape of the gradient sum's tree, as counts: what the reduction does and the memory model predicts."""

import functools


def odd_factor(count: int) -> int:
    """Return the largest odd divisor: the leaves to add in order before the pairwise tree begins."""
    return count // (count & -count)


def elastic_world_sizes(microbatches: int) -> list[int]:
    """Return the data-parallel sizes that give a step of so many micro-batches the same bits: powers of two."""
    return [1 << power for power in range((microbatches // odd_factor(microbatches)).bit_length())]


def run_length(determinism: str, accumulation: int, data_parallel_size: int) -> int:
    """Return how many leaves are added in order: all of a rank with `determinism` "run"."""
    return odd_factor(accumulation * data_parallel_size) if determinism == "elastic" else accumulation


def held_sums(leaves: int, run: int) -> int:
    """Return the partial sums of so many leaves: one a complete subtree, and that of the run in progress."""
    return (leaves // run).bit_count() + (leaves % run > 0)


@functools.cache
def most_held_sums(determinism: str, accumulation: int, data_parallel_size: int) -> int:
    """Return the partial sums that a rank holds at most, each a copy of all gradients."""
    if determinism == "off":
        return 0
    run = run_length(determinism, accumulation, data_parallel_size)
    return max(held_sums(leaves, run) for leaves in range(accumulation))
