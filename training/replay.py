"""Run steps of a run again, from the nearest checkpoint, without touching it: a loss spike of 8 GPUs, seen on one.

Elastic determinism makes the repetition exact: what differs from the record differs for a reason.
"""

import math

from training.checkpoints.tensor_files import state_sha256
from training.job import Job
from training.prefetch import Feed
from training.state import RunState, Trainer
from training.step import train_step
from training.telemetry.metrics_log import read_metrics

KEYS = ("train_loss", "grad_norm", "state_sha256")


def replay(trainer: Trainer, job: Job, state: RunState, first: int, last: int) -> bool:
    """Train from `state` to step `last` and print steps `first` on beside the record. Call it on every rank.

    Returns False when a recorded number is another one.
    """
    recorded: dict[int, dict[str, float | str | None]] = {}
    for record in read_metrics(job.run.directory):
        if "step" in record:
            recorded.setdefault(record["step"], {}).update({key: record[key] for key in KEYS if key in record})
    feed = Feed(job.reading, trainer.ranks, state.step, last)
    same = True
    if trainer.ranks.coordinates:
        print("  step  what          replayed                recorded")
    try:
        for step in range(state.step, last):
            result = train_step(trainer, step, feed)
            skips, problem = trainer.guard.new_skips(), trainer.guard.problem()
            if step + 1 < first and problem is None:
                continue
            digest = state_sha256(trainer, step + 1)
            norm = result.grad_norm.item()
            seen = dict(zip(KEYS, (result.loss.item(), norm if math.isfinite(norm) else None, digest), strict=True))
            if trainer.ranks.coordinates:
                same = _show(step + 1, seen, recorded.get(step + 1, {})) and same
                if skips is not None:
                    print(f"        {skips.last}; the update was skipped")
                if problem is not None:
                    print(f"        {problem}")
            if problem is not None:
                break
    finally:
        feed.close()
    return same


def _show(step: int, seen: dict[str, float | str | None], recorded: dict[str, float | str | None]) -> bool:
    """Print the numbers of a step beside the recorded ones; return whether those that are recorded are the same."""
    for key, value in seen.items():
        was = recorded.get(key)
        verdict = "not recorded" if key not in recorded else "same" if was == value else "DIFFERENT"
        print(f"{step:6}  {key:12}  {str(value)[:22]:22}  {str(was)[:22] if key in recorded else '':22}  {verdict}")
    return all(recorded[key] == value for key, value in seen.items() if key in recorded)
