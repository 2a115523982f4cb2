"""Division of a global batch into micro-batches, and how evenly it occupies the ranks."""

import math

from tokens.batches.rank_shares import balance, longest_share
from tokens.batches.sampling import Layout
from training.parallel.sum_tree import most_sent_sums

MOST_SEQUENCES = 1 << 30  # of a global batch
NEARLY = 0.9  # of the best balance


def microbatch_sizes(batch: int, ranks: int, largest: int = MOST_SEQUENCES) -> list[int]:
    """Return the micro-batches up to `largest` with which so many ranks make up a global batch, ascending.

    Where no micro-batch divides evenly: those with which ranks are nearly as busy as with the best of all.
    """
    share = batch // ranks if batch % ranks == 0 else batch
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = {size for size in (*small, *(share // size for size in small)) if size * ranks <= batch}
    balances = {size: balance(batch // size, ranks) for size in sizes}
    least = NEARLY * max(balances.values(), default=1)
    return sorted(size for size in sizes if size <= largest and balances[size] >= least)


def factors(layout: Layout) -> str:
    """Return the factors of a global batch."""
    size, ranks = layout.microbatch_size, layout.data_parallel_size
    if layout.even:
        return f"micro-batch {size} x accumulation {layout.accumulation} x world size {ranks}"
    return f"{layout.microbatches} micro-batches of {size} on world size {ranks}"


def describe_balance(layout: Layout, level: str | None) -> list[str]:
    """Return the ranks' load, the cost of elastic sums, and a better micro-batch, as a line; none if all is even.

    `level`: determinism as in train.json. Under DDP a rank sends each of its partial sums once, then its part of the
    whole sum, which makes as many bytes again as one.
    """
    ranks, count = layout.data_parallel_size, layout.microbatches
    sent = 1 if level in ("off", "run") else most_sent_sums(count, ranks)
    if layout.even and sent == 1:
        return []
    most, busy = layout.accumulation, balance(count, ranks)
    parts = [f"{count} micro-batches on {ranks} ranks: {most} at most, {busy:.0%} of the ranks' time used"]
    if (fewer := longest_share(count, most)) < ranks:
        parts.append(f"{fewer} ranks are as fast")
    if level != "off":
        elastic = "" if level else "with determinism elastic, "
        parts.append(f"{elastic}gradient communication x{(sent + 1) / 2:g} of an even split")
    sizes = microbatch_sizes(layout.global_batch_size, ranks, layout.microbatch_size - 1)
    if sizes and (better := balance(layout.global_batch_size // sizes[-1], ranks)) > busy:
        parts.append(f"microbatch_size {sizes[-1]} would use {better:.0%}")
    return ["; ".join(parts)]
