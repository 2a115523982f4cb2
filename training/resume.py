"""Resume: find a run's checkpoint, compare it with this job, load it."""

from pathlib import Path

import attrs

from training.checkpoints import archive
from training.checkpoints.compatibility import differences, numerics_drift
from training.checkpoints.directory import find, find_before, load
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.run_record import RunRecord
from training.checkpoints.saved_state import read_state
from training.checkpoints.storage import Checkpoint
from training.parallel.process_group import Ranks, from_coordinator
from training.state import TrainState
from training.telemetry.reporter import print_lines


@attrs.frozen
class ResumeRequest:
    """Run to continue, and how."""

    directory: Path
    wanted: str  # "auto", "never" or a checkpoint's name
    record: RunRecord  # this job's, to compare with the checkpoint's
    allow_drift: bool  # whether the numerics may have changed


def resume(request: ResumeRequest, state: TrainState, ranks: Ranks) -> list[str]:
    """Load the wanted checkpoint, if any, into the state; return the changes of the numerics since.

    Call it on every rank. Raises BadInput for a checkpoint that is missing, damaged or of another run.
    """
    directory, wanted = request.directory, request.wanted
    print_lines(ranks, from_coordinator(ranks, lambda: archive.restore(directory)))
    if wanted == "never":
        archived = from_coordinator(ranks, lambda: archive.archive_all(directory))
        if archived is not None:
            print_lines(ranks, [f"--resume never: earlier results are now in {archived}"])
        return []
    found = from_coordinator(ranks, lambda: find(checkpoints_of(directory), wanted))
    if found is None:
        return []
    changes = _load(found, request, state, ranks)
    # Later checkpoints are damaged, or belong to another branch of the run from here on.
    archived = from_coordinator(ranks, lambda: archive.archive_after(directory, found))
    if archived is not None:
        print_lines(ranks, [f"--resume {wanted}: later checkpoints are now in {archived}"])
    print_lines(ranks, [f"resuming from {found} at step {state.position.step:,} of {request.record.steps:,}"])
    return changes


def load_before(step: int, request: ResumeRequest, state: TrainState, ranks: Ranks) -> None:
    """Load the newest checkpoint before a step, whatever its numerics, or leave the state at step 0.

    Call it on every rank.
    """
    found = from_coordinator(ranks, lambda: find_before(checkpoints_of(request.directory), step))
    if found is not None:
        _load(found, attrs.evolve(request, allow_drift=True), state, ranks)
    source = found or "the start"
    print_lines(ranks, [f"replaying from {source} at step {state.position.step:,}; nothing is written"])


def _load(found: Checkpoint, request: ResumeRequest, state: TrainState, ranks: Ranks) -> list[str]:
    """Print the changes since the checkpoint, then load it; return the changes of the numerics."""
    before = read_state(found).config
    print_lines(ranks, differences(request.directory, before, request.record, found))
    changes = numerics_drift(before, request.record, found, allowed=request.allow_drift)
    print_lines(ranks, [f"WARNING: numerics changed since {found.name}: {change}" for change in changes])
    load(found, state)
    return changes
