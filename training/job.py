"""Job: one launch of a run, from its first step to its last."""

import threading
from pathlib import Path

import attrs

from tokens.batches.micro_batches import Reading
from training.checkpoints.run_record import RunRecord
from training.config.batch_plan import Plan
from training.config.train_config import Run
from training.planning.budget import Budget
from training.validation import Validation


@attrs.frozen(kw_only=True)
class Job:
    """What a loop works through, besides the training state."""

    run: Run
    plan: Plan
    reading: Reading
    validation: Validation | None
    stop_asked: threading.Event  # set by a signal
    last_step: int  # plan.steps, or fewer with --max-steps
    price_per_hour: float | None  # USD
    budget: Budget
    hash_every: int | None  # steps
    config: RunRecord  # kept in every checkpoint
    token_digests: dict[Path, str]  # sha256 of each token file, as it was before the first step
