"""Checkpoints of a run: directories of safetensors and JSON that one process, DDP and FSDP read alike.

    checkpoints/step-00000617/model.safetensors       weights, plain names, no vocabulary padding
                              optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>, momentum_buffer.<name>
                              state.json              position and configuration of the run
                              manifest.json           sizes and sha256, written last
    checkpoints/latest, best                          links, for people

Here they are found and loaded; async_writer.py and atomic_commit.py write them.
"""

import sys

from common.errors import BadInput, printable
from training.checkpoints.saved_state import read_state
from training.checkpoints.storage import LINKS, MANIFEST, Checkpoint, Storage, followed_links, name_of, steps_in
from training.checkpoints.tensor_files import read_tensor_files
from training.checkpoints.verification import verify
from training.state import TrainState


def find(storage: Storage, wanted: str) -> Checkpoint | None:
    """Return the checkpoint to resume from: "auto" is the newest complete one, or None where there is none at all.

    Raises BadInput when checkpoints exist but none verifies, or the named one is missing or damaged.
    """
    if wanted != "auto":
        return _find_named(storage, wanted)
    problems: list[str] = []
    for name in [*reversed(steps_in(storage)), *followed_links(storage)]:  # the latter are damaged, or were renamed
        checkpoint = Checkpoint(storage, name)
        problem = verify(checkpoint)
        if problem is None:
            for line in problems:
                print(printable(f"WARNING: {line}; falling back to {name}"), file=sys.stderr)
            return checkpoint
        problems.append(problem)
    if problems:
        raise BadInput(
            f"{problems[0]}; no other checkpoint is intact: copy it here again, or start anew with --resume never"
        )
    _check_leftovers(storage)
    return None


def find_before(storage: Storage, step: int) -> Checkpoint | None:
    """Return the newest complete checkpoint from which `step` is still to come, or None to begin at the start."""
    earlier = [Checkpoint(storage, name) for name in reversed(steps_in(storage)) if name < name_of(step)]
    return next((checkpoint for checkpoint in earlier if verify(checkpoint) is None), None)


def load(checkpoint: Checkpoint, train_state: TrainState) -> None:
    """Load a checkpoint into the training state. Call it on every rank.

    Raises BadInput when the checkpoint is of another model, or cannot be seen from this rank.
    """
    state = read_state(checkpoint)
    read_tensor_files(checkpoint, train_state)
    train_state.optimizer.steps = state.optimizer_steps
    train_state.loss_scale.load(state.loss_scale, state.config.numerics.get("precision"))
    train_state.position = state.position


def _find_named(storage: Storage, name: str) -> Checkpoint:
    if not storage.exists(name):
        target = storage.target(name)
        reason = "no such checkpoint" if target is None else f"refers to {target}, which does not exist"
        raise BadInput(f"{storage.where(name)}: {reason}; there are {', '.join(storage.names()) or 'none'}")
    if problem := verify(Checkpoint(storage, name)):
        raise BadInput(f"{problem}; resume from another one with --resume NAME")
    return Checkpoint(storage, storage.target(name) or name)


def _check_leftovers(storage: Storage) -> None:
    """Without a checkpoint of the run: raise BadInput for a broken link, and mention copies under other names."""
    copies = [name for name in storage.names() if storage.local_file(name, MANIFEST).is_file()]
    for link in LINKS:
        target = storage.target(link)
        if target is not None:  # its checkpoint was not copied, or deleted by hand
            instead = f"continue from a copy with --resume {copies[0]}" if copies else "copy it here again"
            raise BadInput(
                f"{storage.where(link)}: refers to {target}, which does not exist; {instead}, or start anew with "
                "--resume never"
            )
    if copies:
        found = f"{storage.where('')}: found only {', '.join(copies)}"
        print(printable(f"NOTE: {found}; --resume {copies[0]} continues from it"))
