"""find_batch_size.py on a machine where rank 1 runs out of memory.

Two environment variables determine when this happens. ABOVE is the largest micro-batch that fits. FAIL_IN is "forward",
"backward", "step" or "later" (in a step after the third). FAIL_IN can also be "killed" or "hang": rank 1 then does not
run out of memory, but is killed or hangs.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import find_batch_size
from model import loss as next_token_loss
from training.planning import batch_finder as finder
from training.planning import batch_probe as probe

PLACE, ABOVE = os.environ["FAIL_IN"], int(os.environ["ABOVE"])
MESSAGE = "CUDA out of memory. Tried to allocate 1.00 GiB"
progress = {"size": 0, "steps": 0}
plain_forward, plain_step = next_token_loss.NextTokenLoss.forward, probe.train_step
plain_update = torch.optim.AdamW.step


def fail(place: str) -> None:
    if os.environ.get("RANK") == "1" and place == PLACE and progress["size"] > ABOVE:
        if PLACE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if PLACE == "hang":
            time.sleep(1000)
        raise torch.OutOfMemoryError(MESSAGE)


def forward(self: nn.Module, tokens: Tensor, *targets: Tensor, **options: Any) -> Tensor:
    progress["size"] = len(tokens)
    fail("forward")
    fail("killed")
    fail("hang")
    loss = plain_forward(self, tokens, *targets, **options)
    loss.register_hook(lambda _: fail("backward"))
    return loss


def update(self: torch.optim.AdamW) -> Any:
    fail("step")
    if progress["steps"] > 3:
        fail("later")
    return plain_update(self)


def train_step(state: Any, settings: Any, number: int, next_batch: Any) -> Any:
    progress["steps"] = number + 1
    return plain_step(state, settings, number, next_batch)


finder.PROBE = Path(__file__)
if PLACE == "hang":
    probe.PROBE_SECONDS = 20.0
next_token_loss.NextTokenLoss.forward, torch.optim.AdamW.step, probe.train_step = forward, update, train_step
sys.exit(find_batch_size.main())
