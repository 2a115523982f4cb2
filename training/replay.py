"""Run steps of a run again, from the nearest checkpoint, without touching it: a loss spike of 8 GPUs, seen on one.

Elastic determinism makes the repetition exact: what differs from the record differs for a reason.
"""

import math

from training.checkpoints.tensor_files import state_sha256
from training.job import Job
from training.parallel.process_group import Ranks
from training.prefetch import Feed
from training.state import Position, StepSettings, TrainState
from training.step import train_step
from training.telemetry.metrics_log import read_metrics

KEYS = ("train_loss", "grad_norm", "state_sha256")


def replay(state: TrainState, settings: StepSettings, ranks: Ranks, job: Job, steps: tuple[int, int]) -> bool:
    """Train on and print the first to the last of `steps` beside their record. Call it on every rank.

    Returns False where a number differs from its record.
    """
    first, last = steps
    recorded: dict[int, dict[str, float | str | None]] = {}
    for record in read_metrics(job.run.directory):
        if "step" in record:
            recorded.setdefault(record["step"], {}).update({key: record[key] for key in KEYS if key in record})
    feed = Feed(job.reading, state.parallel.data_parallel.rank, ranks.device, range(state.position.step, last))
    same = True
    if ranks.coordinates:
        print("  step  what          replayed                recorded")
    try:
        for step in range(state.position.step, last):
            result = train_step(state, settings, ranks, step, feed.next)
            state.position = Position(step=step + 1)
            skips, problem = state.guard.new_skips(), state.guard.problem()
            if step + 1 < first and problem is None:
                continue
            digest = state_sha256(state, ranks)
            norm = result.grad_norm.item()
            seen = dict(zip(KEYS, (result.loss.item(), norm if math.isfinite(norm) else None, digest), strict=True))
            if ranks.coordinates:
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
