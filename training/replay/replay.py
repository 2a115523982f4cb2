"""Replay: repeat steps of a run from the nearest checkpoint and compare them with the record, without writing.

Under elastic determinism the repetition is exact, whatever the world size: a loss spike of 8 GPUs is studied on one. A
number that differs from its record differs for a reason.
"""

import math
from pathlib import Path

import attrs

from common.errors import BadInput
from common.output import note, show
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import find_before
from training.checkpoints.run_record import describe_changes, read_record
from training.checkpoints.tensor_files import state_sha256
from training.parallel.process_group import Ranks, from_coordinator
from training.resume import ResumeRequest, begin, load_checkpoint
from training.state import Position, StepSettings, TrainState
from training.step import NextBatch, train_step
from training.telemetry.metrics_log import METRICS, Metric, read_metrics

KEYS = (Metric.TRAIN_LOSS, Metric.GRAD_NORM, Metric.STATE_SHA256)
Numbers = dict[str, float | str | None]  # by one of KEYS


def read_recorded(directory: Path, steps: tuple[int, int], run_steps: int) -> dict[int, Numbers]:
    """Return the numbers in the metrics of each step, from the first to the last. Raises BadInput for other steps."""
    first, last = steps
    if not 1 <= first <= last <= run_steps:
        raise BadInput(f"--replay {first} {last}: wanted steps from 1 to {run_steps}, the first one first")
    numbers: dict[int, Numbers] = {}
    for record in read_metrics(directory):
        if "step" in record:
            numbers.setdefault(record["step"], {}).update({key: record[key] for key in KEYS if key in record})
    return {step: numbers.get(step, {}) for step in range(first, last + 1)}


def replay(
    state: TrainState, settings: StepSettings, ranks: Ranks, next_batch: NextBatch, recorded: dict[int, Numbers]
) -> bool:
    """Train on; print the recorded steps next to their record, and how many have one. Collective.

    Return False where a number differs from its record, where there is none, or where the replay ends before a step
    that has one.
    """
    same = any(recorded.values())
    if not same:
        line = f"{METRICS} has no numbers of these steps to compare with; log_interval and --hash-every write them"
        show(line, once=True)
    show("  step  what          replayed                recorded", once=True)
    for step in range(state.position.step, max(recorded)):
        result = train_step(state, settings, step, next_batch)
        state.position = Position(step=step + 1)
        problem = state.guard.problem()
        if step + 1 < min(recorded) and problem is None:
            continue
        digest = state_sha256(state, ranks)
        norm = result.grad_norm.item()
        seen = dict(zip(KEYS, (result.loss.item(), norm if math.isfinite(norm) else None, digest), strict=True))
        if ranks.coordinates:  # the others have no hash
            same = _show_step(step + 1, seen, recorded.get(step + 1, {})) and same
        if problem is not None:
            show(f"        {problem}", once=True)
            break
    reached = {step: numbers for step, numbers in recorded.items() if step <= state.position.step and numbers}
    same = same and not any(numbers for step, numbers in recorded.items() if step > state.position.step)
    show(describe_comparison(len(reached), len(recorded), same=same), once=True)
    return same


def describe_comparison(compared: int, steps: int, *, same: bool) -> str:
    """Return what a replay has shown: how many steps it compared with their record, and whether they are the same."""
    if not compared:
        return f"compared with their record: none of {steps:,} steps"
    outcome = "all of them are the same" if same else "not all of them are the same"
    if compared < steps:
        outcome += "; the other steps were not compared"
    return f"compared with their record: {compared:,} of {steps:,} steps, {outcome}"


def load_before(step: int, request: ResumeRequest, state: TrainState, ranks: Ranks) -> None:
    """Load the newest checkpoint before a step, or begin as the run did. Call it on every rank."""
    found = from_coordinator(ranks, lambda: find_before(checkpoints_of(request.directory), step))
    if found is not None:
        _, record = load_checkpoint(found, attrs.evolve(request, allow_drift=True), state, ranks)
        changed = [change for change in record.changes if change.step == state.position.step]
        show(*[note(f"{line}; replayed so, and not recorded") for line in describe_changes(changed)], once=True)
    else:
        recorded = from_coordinator(ranks, lambda: read_record(request.directory))
        record = begin(attrs.evolve(request, record=recorded or request.record), state, ranks)
        was, now = (recorded or record).initial_weights, record.initial_weights
        if (was and was.sha256) != (now and now.sha256):
            began = "random weights; leave --init-from out"
            if was is not None:
                began = f"the weights of {was.source}; pass them to --init-from"
            raise BadInput(f"--replay: the run began with {began}")
    source = found or "the start"
    show(f"replaying from {source} at step {state.position.step:,}; nothing is written", once=True)


def _show_step(step: int, seen: Numbers, recorded: Numbers) -> bool:
    """Print the numbers of a step next to the recorded ones; return whether those that are recorded are the same."""
    for key, value in seen.items():
        was = recorded.get(key)
        verdict = "not recorded" if key not in recorded else "same" if was == value else "DIFFERENT"
        before = str(was)[:22] if key in recorded else ""
        show(f"{step:6}  {key:12}  {str(value)[:22]:22}  {before:22}  {verdict}")
    return all(recorded[key] == value for key, value in seen.items() if key in recorded)
