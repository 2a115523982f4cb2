"""Resume: a run continues from the right checkpoint, keeps the right checkpoints, and equals an uninterrupted run."""

import json
import shutil
from pathlib import Path

from reporting.report_page import facts
from reporting.run_history import read_history
from tests.conftest import MakeRun, complete, metrics, one_line, seal_again, train
from tests.evaluation.comparison.stored import output_of
from tests.training.supervision.runs import assert_same_weights
from tests.walks import events
from training.checkpoints.saved_state import verify


def test_resumed_run_equals_an_uninterrupted_one(make_run: MakeRun, finished: Path) -> None:
    stopped = make_run()
    complete(stopped, "--max-steps", "3")
    assert "resuming from" in complete(stopped).stdout
    for key in ("train_loss", "grad_norm"):
        assert metrics(stopped, key) == metrics(finished, key)
    assert metrics(stopped, "validation_loss")[8] == metrics(finished, "validation_loss")[8]
    assert_same_weights(stopped, finished)


def test_finished_run_can_start_over_without_losing_anything(copied: Path) -> None:
    assert "the run is complete: 8 steps, best validation loss" in complete(copied).stdout
    before = (copied / "metrics.jsonl").read_text()
    complete(copied, "--resume", "never", "--max-steps", "1")
    [archive] = (copied / "archive").iterdir()
    assert (archive / "metrics.jsonl").read_text() == before
    assert verify(archive / "checkpoints" / "latest") is None
    assert list(metrics(copied, "train_loss")) == [1]


def test_newest_checkpoints_and_the_best_are_kept(make_run: MakeRun) -> None:
    # This learning rate ruins the model after the first checkpoints, so an early checkpoint is the best one.
    run = make_run(checkpoint_interval=1, keep_checkpoints=2, learning_rate=0.5, warmup_period_percent=50)
    complete(run)
    losses = metrics(run, "validation_loss")
    best = min(range(1, 9), key=losses.__getitem__)
    checkpoints = run / "checkpoints"
    names = {f"step-{step:08d}" for step in (best, 7, 8)}
    assert {path.name for path in checkpoints.iterdir()} == names | {"best", "latest"}
    assert (checkpoints / "best").readlink().name == f"step-{best:08d}"
    assert (checkpoints / "latest").readlink().name == "step-00000008"
    assert json.loads((checkpoints / "best" / "state.json").read_text())["validation_loss"] == losses[best]


def test_resuming_by_name_makes_that_checkpoint_newest(make_run: MakeRun) -> None:
    run = make_run(checkpoint_interval=2)
    complete(run)
    done = complete(run, "--resume", "step-00000004", "--max-steps", "5")
    assert "--resume step-00000004: later checkpoints are now in" in done.stdout
    [archive] = (run / "archive").iterdir()
    assert {path.name for path in (archive / "checkpoints").iterdir()} == {"step-00000006", "step-00000008"}
    again = train(run)
    assert "at step 5 of 8" in again.stdout
    assert list(metrics(run, "train_loss")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_link_to_another_runs_checkpoint_is_refused(copied: Path, make_run: MakeRun) -> None:
    run, other_directory = make_run("mine"), copied / "checkpoints"
    before = sorted(other_directory.iterdir())
    shutil.copytree(other_directory, run / "checkpoints", symlinks=True)  # the checkpoints have the same names
    (run / "checkpoints" / "link").symlink_to(other_directory / before[-1].name)
    assert "in another folder; copy it here" in one_line(train(run, "--resume", "link"))
    assert sorted(other_directory.iterdir()) == before


def test_resumed_copy_replaces_the_checkpoint_of_its_step(make_run: MakeRun) -> None:
    run = make_run(checkpoint_interval=2, validation_interval=None)
    complete(run, "--max-steps", "2")
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "keep-me")
    complete(run, "--resume", "never", "--set", "learning_rate=0.02", "--max-steps", "2")
    [archived] = (run / "archive").glob("*/checkpoints/keep-me")
    shutil.copytree(archived, checkpoints / "keep-me")
    second_manifest = (checkpoints / "step-00000002" / "manifest.json").read_text()
    complete(run, "--resume", "keep-me", "--max-steps", "2")
    first_manifest = (archived / "manifest.json").read_text()
    assert (checkpoints / "step-00000002" / "manifest.json").read_text() == first_manifest != second_manifest
    manifests = {path.read_text() for path in (run / "archive").glob("*/checkpoints/step-00000002/manifest.json")}
    # The archive has the checkpoint of the first run and the checkpoint of the second run.
    assert manifests == {first_manifest, second_manifest}


def test_checkpoint_of_another_version_is_refused(copied: Path) -> None:
    path = (copied / "checkpoints" / "latest").resolve()
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 1}))
    seal_again(path)
    assert "state.json: got format 1, wanted 3: another version of Lockstep wrote it" in one_line(train(copied))


def test_settings_changed_by_a_resume_are_recorded(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    complete(run, "--max-steps", "3")
    options = ("--set", "learning_rate=0.001", "--set", "weight_decay=0.5", "--set", "log_interval=2")
    text = "changed at step 3: learning_rate 0.01 -> 0.001, weight_decay 0.1 -> 0.5"
    for last_step in ("3", "4", "8"):  # the first job has nothing to do
        done = complete(run, *options, "--max-steps", last_step)
        assert (f"NOTE: {text}; the change is recorded in the run" in done.stderr) is (last_step == "4")
        assert (f"NOTE: {text}; not recorded, because no step is left" in done.stderr) is (last_step == "3")
    changes = [(event["step"], event["key"], event["old"], event["new"]) for event in events(run, "settings-changed")]
    assert changes == [(3, "learning_rate", 0.01, 0.001), (3, "weight_decay", 0.1, 0.5)]
    history = read_history(run)
    marks = [mark.text.partition(", ")[0] for mark in history.marks if mark.kind == "settings changed"]
    assert marks == ["learning_rate 0.01 -> 0.001", "weight_decay 0.1 -> 0.5"]
    assert ("settings", text) in facts(history)
    shutil.copytree(run / "checkpoints" / "latest", tmp_path / "copied")
    output_of("export", tmp_path / "copied", tmp_path / "exported", "--tokenizer", "bytes")
    assert f"| settings | {text} |" in (tmp_path / "exported" / "README.md").read_text()


def test_other_validation_windows_reset_the_best_checkpoint(make_run: MakeRun) -> None:
    run = make_run(checkpoint_interval=2, validation_interval=2, learning_rate=0.5, warmup_period_percent=50)
    complete(run, "--max-steps", "4")
    assert json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["best_step"] == 2
    done = complete(run, "--set", "start_val_token=64", "--max-steps", "6")
    assert "NOTE: the run now validates on other windows, so no earlier checkpoint can be the best one" in done.stderr
    losses = metrics(run, "validation_loss")  # the newest line of a step counts
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    best = min((4, 6), key=losses.__getitem__)
    assert (state["best_step"], state["best_validation_loss"]) == (best, losses[best])
    assert (run / "checkpoints" / "best").readlink().name == f"step-{best:08d}"
    assert state["config"]["changes"] == [{"step": 4, "key": "start_val_token", "old": 0, "new": 64}]
