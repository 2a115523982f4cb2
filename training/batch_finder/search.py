"""Candidates of a search for the largest micro-batch, and the next one to try."""

import math

from common.errors import BadInput
from training.config.batch_plan import microbatch_sizes
from training.config.key_groups import BatchOptions
from training.config.train_config import TrainConfig

LARGEST = 4096  # sequences; of candidates without a global batch to keep
FINENESS = 32  # their neighbors differ by 1/32 at most, or by 1


def next_candidate(sizes: list[int], fits: int, fails: float, guess: int | None) -> int | None:
    """Return the next of ascending candidates to try; None when all is known.

    It is the guess while that is undecided; then steps of 1, 2, 4 ... candidates beyond it while all has fit; else the
    one half-way. `fits`, `fails`: the largest known to fit, 0 before; the smallest known not to, infinite before.
    """
    undecided = [size for size in sizes if fits < size < fails]
    if not undecided:
        return None
    near = max((size for size in sizes if size <= (guess or 1)), default=0)
    if near in undecided:
        return near
    if fails == math.inf:
        passed = sum(near < size <= fits for size in sizes)
        return undecided[min(passed, len(undecided) - 1)]
    return undecided[len(undecided) // 2]


def check_world_size(train: TrainConfig, world_size: int) -> None:
    """Raise BadInput when no micro-batch spreads the run's global batch over so many ranks."""
    batch = train.batch.global_batch_size
    if batch is not None and batch < world_size:
        raise BadInput(
            f"{train.file}: global_batch_size: got {batch}, wanted at least the world size, {world_size}; use fewer "
            "ranks"
        )
    if batch is not None and batch % world_size and train.execution.determinism == "run":
        raise BadInput(
            f"{train.file}: global_batch_size: got {batch}, wanted a multiple of the world size, {world_size}, for "
            "determinism run; use a number of ranks that divides it, or determinism elastic"
        )


def candidates(train: TrainConfig, world_size: int) -> list[int]:
    """Return the micro-batches that keep the run's global batch; without one, all sizes, thinned out.

    Raises BadInput as check_world_size does.
    """
    check_world_size(train, world_size)
    if train.batch.global_batch_size is not None:
        return microbatch_sizes(train.batch.global_batch_size, world_size)
    sizes = [1]
    while sizes[-1] < LARGEST:
        sizes.append(sizes[-1] + max(1, sizes[-1] // FINENESS))
    return sizes


def keeping(batch: BatchOptions, world_size: int, largest: int) -> int | None:
    """Return the largest micro-batch up to `largest` that keeps the run's global batch, given or as derived now."""
    derived = batch.microbatch_size * (batch.gradient_accumulation_steps or 1) * world_size
    return max(microbatch_sizes(batch.global_batch_size or derived, world_size, largest), default=None)
