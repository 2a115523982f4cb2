"""Resume: find a run's checkpoint, compare it with this job, load it."""

from pathlib import Path

import attrs

from common.bucket import Bucket
from common.errors import BadInput
from common.json_files import read_json
from training.checkpoints import archive
from training.checkpoints.bucket_checkpoints import check_branch
from training.checkpoints.compatibility import differences, numerics_drift
from training.checkpoints.directory import find_before, load
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.node_copies import find_on_nodes
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.run_record import RESOLVED, RunRecord, WeightsOrigin
from training.checkpoints.saved_state import read_state
from training.checkpoints.storage import Checkpoint, name_of
from training.initial_weights import InitialWeights, check_origin, start_from
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
    initial: InitialWeights | None = None  # what a run without a checkpoint starts from; None: random weights


@attrs.frozen
class Beginning:
    """Beginning of a job: a checkpoint, or the first weights."""

    numerics_changes: list[str]  # since the checkpoint
    initial_weights: WeightsOrigin | None  # of the whole run


def resume(request: ResumeRequest, state: TrainState, disks: NodeDisks, bucket: Bucket | None) -> Beginning:
    """Load the wanted checkpoint into the state, or where there is none the initial weights.

    `bucket`: with checkpoints of the run, too. Call it on every rank. Raises BadInput for a checkpoint that is missing,
    damaged or of another run.
    """
    directory, wanted, ranks = request.directory, request.wanted, disks.ranks
    print_lines(ranks, disks.on_each(lambda: archive.restore(directory))[0])
    if wanted == "never":
        _check_branch(bucket, 0, wanted, ranks)
        archived = disks.on_each(lambda: archive.archive_all(directory))[0]
        if archived is not None:
            print_lines(ranks, [f"--resume never: earlier results are now in {archive.describe(archived)}"])
        return _begin(request, state, ranks)
    found = find_on_nodes(directory, wanted, disks, bucket)
    if found is None:
        return _begin(request, state, ranks)
    beginning = _load(found, request, state, ranks)
    _check_branch(bucket, state.position.step, wanted, ranks)
    # Later checkpoints are damaged, or belong to another branch of the run from here on.
    archived = disks.on_each(lambda: archive.archive_after(directory, found))[0]
    if archived is not None:
        print_lines(ranks, [f"--resume {wanted}: later checkpoints are now in {archived}"])
    best = state.position.best_step
    if best is not None and not found.storage.exists(name_of(best)):
        print_lines(ranks, [f"NOTE: the best checkpoint of the run, {name_of(best)}, is not on this disk"])
    print_lines(ranks, [f"resuming from {found} at step {state.position.step:,} of {request.record.steps:,}"])
    return beginning


def load_before(step: int, request: ResumeRequest, state: TrainState, ranks: Ranks) -> None:
    """Load the newest checkpoint before a step, whatever its numerics, or begin at step 0 as the run did.

    Call it on every rank.
    """
    found = from_coordinator(ranks, lambda: find_before(checkpoints_of(request.directory), step))
    if found is not None:
        _load(found, attrs.evolve(request, allow_drift=True), state, ranks)
    else:
        from_coordinator(ranks, lambda: _check_beginning(request))
        _begin(request, state, ranks)
    source = found or "the start"
    print_lines(ranks, [f"replaying from {source} at step {state.position.step:,}; nothing is written"])


def _check_branch(bucket: Bucket | None, step: int, wanted: str, ranks: Ranks) -> None:
    if bucket is not None:
        from_coordinator(ranks, lambda: check_branch(bucket, step, wanted), group=ranks.download)


def _begin(request: ResumeRequest, state: TrainState, ranks: Ranks) -> Beginning:
    """Begin at step 0."""
    if request.initial is None:
        return Beginning([], None)
    return Beginning([], start_from(request.initial, state, request.directory / "model.json", ranks))


def _check_beginning(request: ResumeRequest) -> None:
    """Raise BadInput where a replay would begin with other weights than the run did."""
    file = request.directory / RESOLVED
    recorded = read_json(file).get("initial_weights") if file.exists() else None
    if recorded is not None and request.initial is None:
        source = recorded["source"]
        raise BadInput(f"--replay: the run began with the weights of {source}; pass --init-from {source}")


def _load(found: Checkpoint, request: ResumeRequest, state: TrainState, ranks: Ranks) -> Beginning:
    """Print the changes since the checkpoint, then load it."""
    before = read_state(found).config
    if request.initial is not None:
        check_origin(request.initial, before.initial_weights, found)
    print_lines(ranks, differences(request.directory, before, request.record, found))
    changes = numerics_drift(before, request.record, found, allowed=request.allow_drift)
    print_lines(ranks, [f"WARNING: numerics changed since {found.name}: {change}" for change in changes])
    load(found, state)
    return Beginning(changes, before.initial_weights)
