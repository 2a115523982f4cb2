"""Search for the largest fitting candidate: galloping, then bisection, on a list of micro-batches."""

import bisect

import attrs

from common.errors import BadInput
from training.config.batch_plan import microbatch_sizes
from training.config.key_groups import BatchOptions
from training.config.train_config import TrainConfig

LARGEST = 4096  # sequences; of candidates without a global batch to keep
FINENESS = 32  # their neighbors differ by 1/32 at most, or by 1


@attrs.define
class Search:
    """State of a search over ascending candidates."""

    candidates: list[int]
    fitting: int = -1  # index of the largest known to fit
    failing: int | None = None  # index of the smallest known not to
    stride: int = 1  # of galloping beyond the guess

    @property
    def largest(self) -> int | None:
        """The largest candidate known to fit."""
        return None if self.fitting < 0 else self.candidates[self.fitting]

    def next(self, guess: int | None) -> int | None:
        """Return the next candidate to try, near the guess while that is undecided; None when all is known."""
        first, last = self.fitting + 1, len(self.candidates) if self.failing is None else self.failing
        if first >= last:
            return None
        place = bisect.bisect_right(self.candidates, guess or 1) - 1
        if self.failing is None and place < first:  # more fits than was guessed
            place = min(first + self.stride - 1, last - 1)
            self.stride *= 2
        elif not first <= place < last:
            place = (first + last) // 2
        return self.candidates[place]

    def learn(self, size: int, *, fits: bool) -> None:
        """Record a trial."""
        place = self.candidates.index(size)
        if fits:
            self.fitting = max(self.fitting, place)
        else:
            self.failing = place if self.failing is None else min(self.failing, place)
            self.fitting = min(self.fitting, place - 1)  # a winner that was not confirmed


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
