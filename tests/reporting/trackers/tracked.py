"""Helpers: write runs, replay them to a tracker, kill replays, and read the data back with the tracker's own reader."""

import json
import os
import signal
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from reporting.trackers.tracker_sync import TrackerSync
from training.telemetry.metrics_log import METRICS

Values = dict[str, dict[int, float]]  # by name and step


def append_steps(run: Path, first: int, last: int, *, loss: float = 2.0, job: int = 0) -> None:
    """Append a job's records, with a validation at every tenth step."""
    lines: list[dict[str, Any]] = [
        {"event": "start", "step": first - 1, "time": f"2026-01-01T0{job}:00:00Z", "elapsed_seconds": 0.0}
        | {"price_per_hour": 3.6}
    ]
    for step in range(first, last + 1):
        lines.append(
            {"step": step, "train_loss": loss + 1 / (step + 2), "learning_rate": 1e-3 / 3, "epochs": [step / 7]}
            | {"grad_norm": None if step == 3 else step / 3, "tokens_per_second": 100.1, "mfu": None}
            | {"peak_memory_bytes": 123_456_789_013, "elapsed_seconds": step * 1.1}
        )
        if step % 10 == 0:
            lines.append({"step": step, "validation_loss": loss / 3, "validation_losses": {"x": loss / 3}})
            lines.append({"event": "checkpoint", "step": step, "time": "2026-01-01T00:01:00Z"})
    run.mkdir(exist_ok=True)
    with (run / METRICS).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def assert_holds_losses(tracked: Values, run: Path) -> None:
    """Compare the values in a tracker with the losses in the metrics file."""
    expected: Values = {"train_loss": {}, "validation_loss": {}}
    for line in map(json.loads, (run / METRICS).read_text().splitlines()):
        if line.get("event") == "start":
            expected = {
                name: {at: value for at, value in values.items() if at <= line["step"]}
                for name, values in expected.items()
            }
        for name in expected.keys() & line.keys():
            expected[name][line["step"]] = line[name]
    assert {name: tracked[name] for name in expected} == expected


def replay(run: Path, name: str) -> tuple[int, int]:
    """Replay a run in this process."""
    with closing(TrackerSync(run, name, "tests")) as sync:
        return sync.advance()


def killed_replay(run: Path, name: str, call: int | None, *, after: bool) -> bool:
    """Replay in a child process. Kill the child just before or after its change number `call` on disk, counted from 0.

    Return whether the child was killed.
    """
    child = os.fork()
    if child == 0:
        try:
            sync = TrackerSync(run, name, "tests")
            counts = iter(range(1000))
            opener = sync._open

            def opened(tracked: Any) -> Any:
                store = opener(tracked)
                for method in ("begin", "append", "close"):
                    setattr(store, method, _deadly(getattr(store, method), counts, call, after=after))
                return store

            sync._open = opened
            sync._write_state = _deadly(sync._write_state, counts, call, after=after)  # type: ignore[method-assign]
            sync.advance()
            sync.close()
        except BaseException:  # noqa: BLE001  # the fork must never return to pytest
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _deadly(act: Callable[..., Any], counts: Any, call: int | None, *, after: bool) -> Callable[..., Any]:
    def acting(*arguments: Any) -> Any:
        is_target = next(counts) == call
        if is_target and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        value = act(*arguments)
        if is_target:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    return acting


def from_tensorboard(run: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    values: Values = {}
    for name in set(events.Tags()["tensors"]) - {"config", "events"}:
        points = events.Tensors(name)
        values[name] = {point.step: make_ndarray(point.tensor_proto).item() for point in points}
        assert len(values[name]) == len(points), "a step occurs twice"
    return values


def from_trackio(database: Path) -> Values:
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    assert len({step for step, _ in rows}) == len(rows), "a step occurs twice"
    values_by_name: Values = {}
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            values_by_name.setdefault(name, {})[step] = value
    return values_by_name


def from_wandb(run: Path) -> tuple[Values, dict[int, str]]:
    """Return the values of the only offline run, and its events by step.

    The format is LevelDB's log: after a header of 7 bytes there are blocks of 32 KiB, which consist of pieces with a
    crc, a size and a kind.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # generated code without types

    [path] = run.glob("wandb/offline-run-*/*.wandb")
    data, position, piece = path.read_bytes(), 7, b""
    values_by_name: Values = {}
    events: dict[int, str] = {}
    while position + 7 <= len(data):
        if (block_rest := 32768 - position % 32768) < 7:
            position += block_rest
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        piece += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind not in (1, 4):  # neither a complete record nor the last piece of one
            continue
        record, piece = Record.FromString(piece), b""
        values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "events" in values:
            events[values["_step"]] = values.pop("events")
        for name, value in values.items():
            assert values["_step"] not in values_by_name.setdefault(name, {}), "a step occurs twice"
            values_by_name[name][values["_step"]] = value
    return values_by_name, events
