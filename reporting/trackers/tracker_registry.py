"""Registry of trackers. To add one: write its Store, the interface in tracker_sync.py, in a file, add a line here."""

from collections.abc import Callable
from importlib import import_module

import attrs

from common.errors import BadInput
from reporting.trackers.tracker_sync import Store, TrackedRun


@attrs.frozen
class Tracker:
    """A tracker: the place of its Store, and the package it needs."""

    module: str
    kind: str
    requirement: str  # as tested


TRACKERS = {
    "tensorboard": Tracker("reporting.trackers.tensorboard_events", "TensorBoardEvents", "tensorboard==2.21.0"),
    "wandb": Tracker("reporting.trackers.wandb_run", "WandbRun", "wandb==0.31.0"),
    "trackio": Tracker("reporting.trackers.trackio_run", "TrackioRun", "trackio==0.43.0"),
}


def store_of(name: str) -> Callable[[TrackedRun], Store]:
    """Return what opens a tracker's store of a run. Raises BadInput where its package is missing."""
    tracker = TRACKERS[name]
    try:
        import_module(name)
    except ImportError as error:
        raise BadInput(f"--to {name}: needs {name}: pip install {tracker.requirement}") from error
    opener: Callable[[TrackedRun], Store] = getattr(import_module(tracker.module), tracker.kind)
    return opener
