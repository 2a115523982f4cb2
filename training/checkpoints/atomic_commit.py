"""Atomic commit of a checkpoint: rank 0's part of a save, safe against a kill between any two of its lines.

A checkpoint is written under a hidden name, so under its own name it is complete. Nothing is resumed through the links
`latest` and `best`, which serve people.
"""

from collections.abc import Mapping, Sequence

import attrs

from training.checkpoints import crash_points
from training.checkpoints.checkpoint_manifest import manifest_text
from training.checkpoints.saved_state import SavedState
from training.checkpoints.storage import (
    LINKS,
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Storage,
    WrittenBytes,
    name_of,
    steps_in,
)
from training.checkpoints.tensor_files import combined_sha256


def seal(storage: Storage, name: str, state: SavedState, written: Mapping[str, Sequence[WrittenBytes]]) -> None:
    """Read back both tensor files, compare them with what was `written`, then add state and manifest."""
    files = {file: storage.entry(name, file, written[file]) for file in (WEIGHTS, OPTIMIZER)}
    crash_points.reached("hashed")
    digests = {file: entry.sha256 for file, entry in files.items()}
    state = attrs.evolve(state, state_sha256=combined_sha256(state.position.step, digests))
    text = state.text().encode()
    storage.put(name, STATE, text)
    crash_points.reached("state written")
    files[STATE] = storage.entry(name, STATE, [WrittenBytes.of(0, text)])
    storage.put(name, MANIFEST, manifest_text(files).encode())
    crash_points.reached("manifest written")


def tidy(storage: Storage, name: str, best_step: int | None, keep: int) -> None:
    """Make the links refer to the newest and the best checkpoint, and delete all but those and the newest `keep`."""
    storage.point("latest", name)
    # Each time, not only for a new best one: a kill may have come between that one's publication and its link.
    point_best(storage, best_step)
    kept = {storage.target(link) for link in LINKS}
    storage.remove([name for name in steps_in(storage)[:-keep] if name not in kept])


def point_best(storage: Storage, step: int | None) -> bool:
    """Make `best` refer to the checkpoint of a step, if there is one; return whether there is."""
    if step is None or not storage.exists(name_of(step)):
        return False
    storage.point("best", name_of(step))
    return True
