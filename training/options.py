"""Options: settings of one launch that the run directory does not hold."""

from pathlib import Path

import attrs

from training.planning.budget import Budget


@attrs.frozen(kw_only=True)
class Options:
    """What the command line adds to a run directory."""

    token_files: Path | None
    follow: bool  # token files that are still being written
    resume: str  # "auto", "never" or a checkpoint's name
    device: str | None
    max_steps: int | None
    price_per_hour: float | None
    budget: Budget
    hash_every: int | None  # steps
    allow_numerics_drift: bool
    replay: tuple[int, int] | None  # first and last step
    began: float  # time.perf_counter() when the job started
