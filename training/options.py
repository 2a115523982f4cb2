"""Options: settings of one launch that the run directory does not hold."""

import time
from pathlib import Path

import attrs

from training.planning.budget import Budget


@attrs.frozen(kw_only=True)
class Options:
    """Command-line options of a training job."""

    token_files: Path | None = None  # instead of train.json's dataset
    follow: bool = False  # train on token files that are still being prepared
    resume: str = "auto"  # or "never", or a checkpoint's name
    device: str | None = None  # "cuda", "cpu" or None: cuda where there is a GPU
    max_steps: int | None = None
    price_per_hour: float | None = None  # of the machine, USD
    budget: Budget = attrs.field(factory=Budget)
    hash_every: int | None = None  # steps
    allow_numerics_drift: bool = False
    replay: tuple[int, int] | None = None  # first and last step
    began: float = attrs.field(factory=time.perf_counter)  # when the job started, by time.perf_counter()
