"""Saving policy: the outcome of a save is reported once, and only a checkpoint on the disk can be the best one."""

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from common.errors import BadInput
from training.checkpoints.bucket_upload import Uploader, UploadOutcome
from training.checkpoints.writer import CheckpointWriter
from training.saving import Saving
from training.state import Position
from training.telemetry.reporter import Reporter
from training.telemetry.time_ledger import TimeLedger


def saving_of(problem: str | None = None) -> tuple[Saving, Any, Any, Any]:
    """Return the policy after step 3, the state, the writer and the reporter.

    A save ends when `writer.may_end` is set. The checkpoint is then durable, unless there is a problem.
    """
    state: Any = SimpleNamespace(position=Position(step=3, best_step=2, best_validation_loss=5.0))
    writer, reporter = create_autospec(CheckpointWriter, instance=True), create_autospec(Reporter, instance=True)
    writer.uploader, writer.may_end = create_autospec(Uploader, instance=True), threading.Event()
    writer.uploader.ended.return_value, writer.directory = [], None
    writer.stage.side_effect = lambda: SimpleNamespace(position=state.position)

    def write(_: object) -> tuple[bool, BadInput | None]:
        assert writer.may_end.wait(60)
        return problem is None, None if problem is None else BadInput(problem, reason="disk-full")

    writer.write.side_effect = write
    reporter.ledger = TimeLedger(time.perf_counter())
    return Saving(writer, state, reporter, 60.0), state, writer, reporter


def events(reporter: Any) -> list[tuple[int, str]]:
    return [call.args for call in reporter.event.call_args_list]


def test_save_is_reported_once() -> None:
    saving, state, writer, reporter = saving_of()
    assert saving.newest == 3  # the checkpoint from which the run was resumed
    state.position = Position(step=4)
    saving.begin()
    assert saving.newest == 4 and state.position.elapsed_seconds > 0
    saving.poll()
    assert events(reporter) == []
    writer.may_end.set()
    while not events(reporter):
        saving.poll()
    saving.poll()
    saving.settle()
    assert events(reporter) == [(4, "checkpoint")]


def test_time_to_stop_includes_the_save_in_flight() -> None:
    saving, _, writer, _ = saving_of()
    assert saving.seconds_to_stop == 60.0  # the expected time, because no save has been measured
    saving.begin()
    assert saving.seconds_to_stop == 120.0
    writer.may_end.set()
    saving.settle()
    assert 0 < saving.seconds_to_stop < 60.0


def test_failed_save_restores_the_best_and_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    saving, state, writer, reporter = saving_of("disk full")
    writer.may_end.set()
    state.position = Position(step=4, best_step=4, best_validation_loss=1.0)
    saving.begin()
    saving.settle()
    assert (state.position.best_step, state.position.best_validation_loss) == (2, 5.0)
    assert events(reporter) == [(4, "checkpoint-failed")]
    line = "step 4: NOT SAVED, to be tried again at the next checkpoint: disk full"
    assert capsys.readouterr().err == f"WARNING: {line}\n"
    state.position = Position(step=8, best_step=8, best_validation_loss=1.0)
    saving.begin()
    with pytest.raises(
        BadInput, match=r"^disk full; the last steps are not saved, but older checkpoints are unchanged"
    ) as raised:
        saving.settle(required=True)
    assert raised.value.reason == "disk-full"


def test_upload_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    saving, _, writer, reporter = saving_of()
    failed = UploadOutcome("step-00000006", "s3://a/b: full", 3.0)
    writer.uploader.ended.side_effect = [[UploadOutcome("step-00000004", None, 2.0), failed], []]
    saving.poll()
    saving.poll()
    assert events(reporter) == [(4, "upload"), (6, "upload-failed")]
    line = "step 6: saved on the disk, but NOT UPLOADED, to be tried again at the next checkpoint: s3://a/b: full"
    assert capsys.readouterr().err == f"WARNING: {line}\n"
