"""TensorBoard: an event file in the run's folder `tensorboard/`. Scalars are float64 tensors, so they are exact."""

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE
from tensorboard.plugins.scalar import metadata as scalars
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from common.files import writing
from reporting.trackers.tracker_sync import Store, TrackedRow, TrackedRun

FOLDER = "tensorboard"
CONFIG = "config"  # name of the first text in a file
NAME_PREFIX_BYTES = 256  # the name is within this number of bytes from the beginning of the file
SCALAR = scalars.create_summary_metadata(display_name="", description="")
TEXT = texts.create_summary_metadata(display_name="", description="")


class TensorBoardEvents(Store):
    """The event file of one run.

    If all rows are sent again, they are written to a new file, because in an existing file, TensorBoard notices only
    appended data.
    """

    def __init__(self, run: TrackedRun):
        self._folder, self._config = run.directory / FOLDER, run.config

    def fingerprint(self) -> Any:
        return [[path.name, path.stat().st_size] for path in self._files()]

    def begin(self, version: int) -> None:
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            for path in self._files():
                path.unlink()
            path = self._folder / f"events.out.tfevents.{time.time_ns()}.v{version}"
        config = Summary(value=[_text(CONFIG, json.dumps(self._config, indent=2))])
        head = Event(wall_time=time.time(), file_version="brain.Event:2")
        self._write(path, [head, Event(wall_time=time.time(), summary=config)])

    def append(self, rows: Sequence[TrackedRow]) -> None:
        events = []
        for row in rows:
            values = [_scalar(name, value) for name, value in row.values.items()]
            values += [_text("events", "; ".join(row.events))] if row.events else []
            events.append(Event(step=row.step, wall_time=row.time or 0.0, summary=Summary(value=values)))
        self._write(self._files()[-1], events)

    def _files(self) -> list[Path]:
        """Return the event files that this class wrote. Other files in the folder belong to the user."""
        return sorted(path for path in self._folder.glob("events.out.tfevents.*") if _is_ours(path))

    def _write(self, path: Path, events: Sequence[Any]) -> None:
        with writing(path), path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())


def _is_ours(path: Path) -> bool:
    """Return whether `begin` wrote this event file. The file's name and its first bytes show this.

    An empty file counts as ours, because the process may have been killed before it wrote anything.
    """
    if not re.fullmatch(r"events\.out\.tfevents\.\d{19}\.v\d+", path.name) or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(NAME_PREFIX_BYTES)
    return not head or (b"brain.Event:2" in head and CONFIG.encode() in head)


def _scalar(name: str, value: float) -> Any:
    tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=TensorShapeProto(), double_val=[value])
    return Summary.Value(tag=name, metadata=SCALAR, tensor=tensor)


def _text(name: str, text: str) -> Any:
    return Summary.Value(tag=name, metadata=TEXT, tensor=make_tensor_proto([text.encode()], dtype="string"))
