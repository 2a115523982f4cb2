"""Following token files that are still being prepared (train.py --follow): all ranks wait for a step's tokens."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from common.errors import BadInput, printable
from tokens.batches.micro_batches import Reading, ready
from tokens.prepare.growing_tokens import GrowingTokens
from training.parallel.process_group import Ranks

TOKEN_POLL_SECONDS = 1.0  # between two looks at the commit log
REMIND_SECONDS = 60.0  # between two log lines while waiting


def wait_for_validation(growing: GrowingTokens, wanted_tokens: int, *, say: bool) -> None:
    """Wait until a validation stream has enough tokens. Raises BadInput when it ends with fewer."""
    growing.refresh()
    while (have := growing.committed("validation")) < wanted_tokens:
        if growing.finished:
            raise BadInput(
                f"{growing.directory}: its validation ended with {have:,} tokens, wanted at least {wanted_tokens:,}; "
                "hold out more with --validation-fraction, or lower validation_sequences in train.json"
            )
        if say:
            say = False
            where = printable(f"{growing.directory}: {growing.progress()}")
            print(f"waiting for {wanted_tokens:,} tokens to validate on; {where}", flush=True)
        if (problem := growing.abandoned()) is not None:
            raise BadInput(problem)
        time.sleep(TOKEN_POLL_SECONDS)
        growing.refresh()


def wait_for_step(
    reading: Reading, step: int, ranks: Ranks, stopping: Callable[[], bool], say: Callable[[str], None]
) -> bool:
    """Wait until every rank sees the tokens of a step; return False when asked to stop, or when no more will come.

    Call it on every rank. No rank waits alone for data while the others wait for it in a collective.
    """
    told = -REMIND_SECONDS
    while True:
        is_ready = ready(reading, step)
        looks = not is_ready and ranks.coordinates
        problem = next(filter(None, (each.abandoned() for each in reading.growing if looks)), None)
        flags = torch.tensor([float(is_ready), float(problem is None)])
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=ranks.control)
        if flags[0].item():
            return True
        if problem is not None:
            say(problem)
        if not flags[1].item() or stopping():
            return False
        if time.monotonic() - told >= REMIND_SECONDS:
            told = time.monotonic()
            say(f"waiting for tokens: {'; '.join(f'{each.directory}: {each.progress()}' for each in reading.growing)}")
        time.sleep(TOKEN_POLL_SECONDS)
