"""Resume: find a run's checkpoint, compare it with this job, and load it."""

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
    checkpoint: str  # the value of --resume: "auto", "never" or a checkpoint's name
    record: RunRecord  # the record of this job, to be compared with the checkpoint's record
    allow_drift: bool  # whether to resume even if the numerics have changed
    initial: InitialWeights | None = None  # the model that a run without a checkpoint starts from; None: random weights
    tokenizer: TokenizerRecord | None = None  # the tokenizer of the run's tokens


def resume(
    request: ResumeRequest, state: TrainState, ranks: Ranks, disk: RankGroup, bucket: "Bucket | None"
) -> tuple[list[str], RunRecord]:
    """Load the requested checkpoint into the state, or the initial weights if there is no checkpoint.

    Returns the changes in the numerics since the checkpoint, and this job's record, which takes over some values from
    the checkpoint's record. Checkpoints are searched for on the disk and in the `bucket`. Call it on every rank. Raises
    BadInput if the checkpoint is missing, damaged or from another run.
    """
    directory, name = request.directory, request.checkpoint
    on_disks = partial(once_per_disk, ranks, disk)
    exist = on_disks(lambda: os.path.lexists(checkpoints_of(directory)) or bool(misplaced(directory)))
    if name == "auto" and bucket is None and not any(exist):
        return [], begin(request, state, ranks)
    from training.checkpoints import archive
    from training.checkpoints.atomic_commit import recover
    from training.checkpoints.nodes.node_copies import find_on_disks

    on_disks(lambda: recover(checkpoints_of(directory)))
    if name == "never":
        _check_branch(bucket, 0, name, ranks)
        archived = on_disks(lambda: archive.archive_all(directory))[0]
        if archived is not None:
            show(f"--resume never: earlier results are now in {archive.describe(archived)}", once=True)
        return [], begin(request, state, ranks)
    checkpoint = find_on_disks(directory, name, ranks, disk, bucket)
    if checkpoint is None:
        return [], begin(request, state, ranks)
    numerics_changes, record = load_checkpoint(checkpoint, request, state, ranks)
    _check_branch(bucket, state.position.step, name, ranks)
    gather(ranks, None)  # waits until all ranks have read the checkpoint, which may be renamed below
    # Later checkpoints are damaged, or they now belong to a branch of the run that is no longer continued.
    archived = on_disks(lambda: archive.archive_after(checkpoint))[0]
    if archived is not None:
        show(f"--resume {name}: later checkpoints are now in {archived}", once=True)
    best = state.position.best_step
    if best is not None and not is_folder(checkpoint.with_name(name_of(best))):
        show(note(f"the best checkpoint of the run, {name_of(best)}, is not on this disk"), once=True)
    show(f"resuming from {checkpoint} at step {state.position.step:,} of {request.record.steps:,}", once=True)
    return numerics_changes, record


def _check_branch(bucket: "Bucket | None", step: int, name: str, ranks: Ranks) -> None:
    if bucket is not None:
        from training.checkpoints.lookup import check_branch

        from_coordinator(ranks, lambda: check_branch(bucket, step, name), group=ranks.download)


def begin(request: ResumeRequest, state: TrainState, ranks: Ranks) -> RunRecord:
    """Begin the run at step 0, with initial weights; return this job's record."""
    origin = None
    if request.initial is None:
        start_random(state, request.record.train.random_seed)
    else:
        origin = start_from(request.initial, state, request.directory / "model.json", request.tokenizer, ranks)
    return attrs.evolve(request.record, initial_weights=origin)


def load_checkpoint(
    checkpoint: Path, request: ResumeRequest, state: TrainState, ranks: Ranks
) -> tuple[list[str], RunRecord]:
    """Print the changes since a checkpoint, then load it. Returns what `resume` returns. Call this on every rank."""
    from training.checkpoints import compatibility

    before = read_state(checkpoint).config
    if request.initial is not None:
        check_origin(request.initial, before.initial_weights, checkpoint)
    show(*compatibility.differences(request.directory, before, request.record, checkpoint), once=True)
    numerics = request.record.numerics
    if ranks.device.type == "cuda":
        from training.exactness.attention_kernel import Shape, keep_attention

        microbatch_size, config = request.record.train.batch.microbatch_size, state.parallel.network.config
        shape = Shape(config, microbatch_size, numerics["precision"], ranks.device)
        numerics = keep_attention(shape, before.numerics, numerics, ranks)
    record = attrs.evolve(request.record, numerics=numerics, initial_weights=before.initial_weights)
    numerics_changes = compatibility.numerics_drift(before, record, checkpoint, allowed=request.allow_drift)
    show(*[warning(f"numerics changed since {checkpoint.name}: {change}") for change in numerics_changes], once=True)
    load(checkpoint, state)
    setting_changes = compatibility.changed_settings(before, record, state.position.step)
    if not compatibility.validates_alike(before, record):
        if state.position.best_step is not None:
            line = "the run now validates on other windows, so no earlier checkpoint can be the best one"
            show(note(line), once=True)
        state.position = attrs.evolve(state.position, validation_loss=None, best_step=None, best_validation_loss=None)
    changes = compatibility.all_changes(before.changes, setting_changes)
    return numerics_changes, attrs.evolve(record, changes=changes)
