"""Replay: train some steps of a run again, from the last checkpoint before them, and compare results with the metrics.

Nothing is written. Under elastic determinism, the replay is exact on any world size, so that a loss spike on 8 GPUs can
be studied on one GPU. A number that differs from its record is never just rounding noise; it has a cause.
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
Numbers = dict[str, float | str | None]  # the numbers of a step, under the names in KEYS


def read_recorded(directory: Path, steps: tuple[int, int], run_steps: int) -> dict[int, Numbers]:
    """Return the numbers recorded in the metrics for each step, from the first of `steps` to the last.

    Raises BadInput if the run does not have these steps.
    """
    first, last = steps
    if not 1 <= first <= last <= run_steps:
        raise BadInput(f"--replay {first} {last}: wanted two steps from 1 to {run_steps} in ascending order")
    numbers: dict[int, Numbers] = {}
    for record in read_metrics(directory):
        if "step" in record:
            numbers.setdefault(record["step"], {}).update({key: record[key] for key in KEYS if key in record})
    return {step: numbers.get(step, {}) for step in range(first, last + 1)}


def replay(
    state: TrainState, settings: StepSettings, ranks: Ranks, next_batch: NextBatch, recorded: dict[int, Numbers]
) -> bool:
    """Train, and print the numbers of each step next to the recorded ones; then print how many steps were compared.

    Call it on every rank. Returns False if a number differs from its record, if no step has a record, or if the replay
    ends before a step that has a record.
    """
    same = any(recorded.values())
    if not same:
        reason = "log_interval and --hash-every determine which steps are recorded"
        show(f"{METRICS} has no numbers for these steps; {reason}", once=True)
    show("  step  what          replayed                recorded", once=True)
    for step in range(state.position.step, max(recorded)):
        result = train_step(state, settings, step, next_batch)
        state.position = Position(step=step + 1)
        problem = state.guard.problem()
        if step + 1 < min(recorded) and problem is None:
            continue
        digest = state_sha256(state, ranks)
        norm = result.grad_norm.item()
        replayed = dict(zip(KEYS, (result.loss.item(), norm if math.isfinite(norm) else None, digest), strict=True))
        if ranks.coordinates:  # the other ranks have no hash
            same = _show_step(step + 1, replayed, recorded.get(step + 1, {})) and same
        if problem is not None:
            show(f"        {problem}", once=True)
            break
    reached_steps = [step for step, numbers in recorded.items() if step <= state.position.step and numbers]
    same = same and not any(numbers for step, numbers in recorded.items() if step > state.position.step)
    show(describe_comparison(len(reached_steps), len(recorded), same=same), once=True)
    return same


def describe_comparison(compared: int, steps: int, *, same: bool) -> str:
    """Return a line that says how many recorded steps a replay has compared, and whether all of them are the same."""
    if not compared:
        return f"compared with their record: none of {steps:,} steps"
    outcome = "all of them are the same" if same else "not all of them are the same"
    if compared < steps:
        outcome += "; the other steps were not compared"
    return f"compared with their record: {compared:,} of {steps:,} steps, {outcome}"


def load_before(step: int, request: ResumeRequest, state: TrainState, ranks: Ranks) -> None:
    """Load the newest checkpoint before a step or, if there is none, begin as the run did. Call it on every rank."""
    checkpoint = from_coordinator(ranks, lambda: find_before(checkpoints_of(request.directory), step))
    if checkpoint is not None:
        _, record = load_checkpoint(checkpoint, attrs.evolve(request, allow_drift=True), state, ranks)
        changes = [change for change in record.changes if change.step == state.position.step]
        consequence = "the replay uses the new values, which are not recorded"
        show(*[note(f"{line}; {consequence}") for line in describe_changes(changes)], once=True)
    else:
        run_record = from_coordinator(ranks, lambda: read_record(request.directory))
        record = begin(attrs.evolve(request, record=run_record or request.record), state, ranks)
        recorded_origin, origin = (run_record or record).initial_weights, record.initial_weights
        if (recorded_origin and recorded_origin.sha256) != (origin and origin.sha256):
            advice = "random weights; leave out --init-from"
            if recorded_origin is not None:
                advice = f"the weights of {recorded_origin.source}; pass them to --init-from"
            raise BadInput(f"--replay: the run began with {advice}")
    source = checkpoint or "the start"
    show(f"replaying from {source} at step {state.position.step:,}; nothing is written", once=True)


def _show_step(step: int, replayed: Numbers, recorded: Numbers) -> bool:
    """Print the numbers of a step next to the recorded ones; return whether all recorded numbers are the same."""
    for key, number in replayed.items():
        verdict = "not recorded" if key not in recorded else "same" if recorded[key] == number else "DIFFERENT"
        recorded_text = str(recorded[key])[:22] if key in recorded else ""
        show(f"{step:6}  {key:12}  {str(number)[:22]:22}  {recorded_text:22}  {verdict}")
    return all(recorded[key] == number for key, number in replayed.items() if key in recorded)
