"""Resume: find a run's checkpoint, compare it with this job, load it."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.files import is_folder
from common.output import note, show, warning
from tokens.format.manifest import TokenizerRecord
from training.checkpoints.directory import checkpoints_of, misplaced, name_of
from training.checkpoints.initial_weights import InitialWeights, check_origin, start_from, start_random
from training.checkpoints.run_record import RunRecord
from training.checkpoints.saved_state import read_state
from training.checkpoints.tensor_files import load
from training.parallel.process_group import RankGroup, Ranks, from_coordinator, gather, once_per_disk
from training.state import TrainState

if TYPE_CHECKING:
    from common.bucket import Bucket


@attrs.frozen
class ResumeRequest:
    directory: Path
    wanted: str  # "auto", "never" or a checkpoint's name
    record: RunRecord  # this job's, to compare with the checkpoint's
    allow_drift: bool  # whether the numerics may have changed
    initial: InitialWeights | None = None  # what a run without a checkpoint starts from; None: random weights
    tokenizer: TokenizerRecord | None = None  # of the run's tokens


def resume(
    request: ResumeRequest, state: TrainState, ranks: Ranks, disk: RankGroup, bucket: "Bucket | None"
) -> tuple[list[str], RunRecord]:
    """Load the wanted checkpoint into the state, or where there is none the initial weights.

    Returns the changes of the numerics since the checkpoint, and this job's record with what it takes over from the
    checkpoint's. `bucket`: with checkpoints of the run, too. Call it on every rank. Raises BadInput for a checkpoint
    that is missing, damaged or of another run.
    """
    directory, wanted = request.directory, request.wanted
    on_disks = partial(once_per_disk, ranks, disk)
    exist = on_disks(lambda: os.path.lexists(checkpoints_of(directory)) or bool(misplaced(directory)))
    if wanted == "auto" and bucket is None and not any(exist):
        return [], begin(request, state, ranks)
    from training.checkpoints import archive
    from training.checkpoints.atomic_commit import recover
    from training.checkpoints.nodes.node_copies import find_on_disks

    on_disks(lambda: recover(checkpoints_of(directory)))
    if wanted == "never":
        _check_branch(bucket, 0, wanted, ranks)
        archived = on_disks(lambda: archive.archive_all(directory))[0]
        if archived is not None:
            show(f"--resume never: earlier results are now in {archive.describe(archived)}", once=True)
        return [], begin(request, state, ranks)
    found = find_on_disks(directory, wanted, ranks, disk, bucket)
    if found is None:
        return [], begin(request, state, ranks)
    beginning = load_checkpoint(found, request, state, ranks)
    _check_branch(bucket, state.position.step, wanted, ranks)
    gather(ranks, None)  # all ranks have read it: a folder in the place of a link is renamed now
    # Later checkpoints are damaged, or belong to another branch of the run from here on.
    archived = on_disks(lambda: archive.archive_after(found))[0]
    if archived is not None:
        show(f"--resume {wanted}: later checkpoints are now in {archived}", once=True)
    best = state.position.best_step
    if best is not None and not is_folder(found.with_name(name_of(best))):
        show(note(f"the best checkpoint of the run, {name_of(best)}, is not on this disk"), once=True)
    show(f"resuming from {found} at step {state.position.step:,} of {request.record.steps:,}", once=True)
    return beginning


def _check_branch(bucket: "Bucket | None", step: int, wanted: str, ranks: Ranks) -> None:
    if bucket is not None:
        from training.checkpoints.lookup import check_branch

        from_coordinator(ranks, lambda: check_branch(bucket, step, wanted), group=ranks.download)


def begin(request: ResumeRequest, state: TrainState, ranks: Ranks) -> RunRecord:
    """Begin at step 0; return this job's record."""
    origin = None
    if request.initial is None:
        start_random(state, request.record.train.random_seed)
    else:
        origin = start_from(request.initial, state, request.directory / "model.json", request.tokenizer, ranks)
    return attrs.evolve(request.record, initial_weights=origin)


def load_checkpoint(
    found: Path, request: ResumeRequest, state: TrainState, ranks: Ranks
) -> tuple[list[str], RunRecord]:
    """Print the changes since the checkpoint, then load it; return as `resume`. Call it on every rank."""
    from training.checkpoints import compatibility

    before = read_state(found).config
    if request.initial is not None:
        check_origin(request.initial, before.initial_weights, found)
    show(*compatibility.differences(request.directory, before, request.record, found), once=True)
    numerics = request.record.numerics
    if ranks.device.type == "cuda":
        from training.exactness.attention_kernel import Shape, keep_attention

        microbatch_size, config = request.record.train.batch.microbatch_size, state.parallel.network.config
        shape = Shape(config, microbatch_size, numerics["precision"], ranks.device)
        numerics = keep_attention(shape, before.numerics, numerics, ranks)
    record = attrs.evolve(request.record, numerics=numerics, initial_weights=before.initial_weights)
    changes = compatibility.numerics_drift(before, record, found, allowed=request.allow_drift)
    show(*[warning(f"numerics changed since {found.name}: {change}") for change in changes], once=True)
    load(found, state)
    changed = compatibility.changed_settings(before, record, state.position.step)
    if not compatibility.validates_alike(before, record):
        if state.position.best_step is not None:
            show(note("other validation windows than before: the best checkpoint is found anew"), once=True)
        state.position = attrs.evolve(state.position, validation_loss=None, best_step=None, best_validation_loss=None)
    return changes, attrs.evolve(record, changes=compatibility.all_changes(before.changes, changed))
