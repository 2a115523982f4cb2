"""report.py: options without effect are usage errors, and --watch updates the report until the runs end."""

import itertools
import json
import re
import signal
from pathlib import Path

import pytest

from common.arguments import parse
from common.errors import BadInput, UsageError
from reporting.command import ReportCommand, _write, watch
from reporting.command import run as report
from reporting.samples.sample_log import read_samples
from tests import launch
from tests.conftest import ROOT, MakeRun
from tests.launch import wait_until
from tests.reporting.written_runs import start as started
from tests.reporting.written_runs import training, write_run
from tests.training.supervision.runs import start
from training.supervision.run_lock import is_locked, take_run_lock
from training.telemetry.metrics_log import METRICS, REPORT


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("a --every 5", "--every needs --watch"),
        ("a --project x", "--project goes with --to, not with the page"),
        ("a --project x --to tensorboard", "--project needs --to wandb or --to trackio"),
        ("a --output b --to trackio", "--output goes with the page, not with --to"),
        ("a --no-samples --to trackio", "--no-samples goes with the page, not with --to"),
        ("a --no-samples --reference b", "--no-samples goes with the page, not with --reference"),
        ("a --watch --reference b", "--watch goes with the page or --to, not with --reference"),
        ("a --to wandb --reference b", "--to and --reference exclude each other"),
        ("a b b/../a", "a and b/../a are the same run; pass it once"),
        (__file__, "is a file, not a directory; for a sweep or a ladder, pass "),
    ],
)
def test_options_without_effect_are_usage_errors(words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        parse("report.py", ReportCommand, words.split())


def test_watch_rewrites_the_report_until_the_job_ends(tmp_path: Path) -> None:
    job = take_run_lock(tmp_path)
    assert job.file is not None and is_locked(tmp_path)
    contents: list[str] = []
    content = iter(["one", "two", "three"])

    def write() -> None:
        contents.append((tmp_path / METRICS).read_text() if contents else "")
        if len(contents) == 3:
            job.file.close()  # type: ignore[union-attr]
        (tmp_path / METRICS).write_text(next(content, "three"))

    watch(lambda: [tmp_path], write, 0.01)
    assert contents[:4] == ["", "one", "two", "three"]
    assert not is_locked(tmp_path)


def test_a_run_without_a_job_is_reported_once(tmp_path: Path) -> None:
    calls = itertools.count()
    watch(lambda: [tmp_path, tmp_path / "absent"], lambda: next(calls) and None, 0.01)
    assert next(calls) == 1


def test_a_sweep_of_nine_runs_and_an_archive_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda _: None)
    (output := tmp_path / "sweep").mkdir()
    for number in range(9):
        write_run(output / f"base-seed-{number}", training())
    (output / "unbegun").mkdir()
    report(ReportCommand(runs=(output,)))
    page = (output / REPORT).read_text()
    assert "<h1>9 runs</h1>" in page and page.count("<td>complete</td>") == 9
    archived = output / "base-seed-0" / "archive" / "20260101T000000Z"
    archived.mkdir(parents=True)
    (output / "base-seed-0" / METRICS).rename(archived / METRICS)
    for path in (archived, archived.parent):
        report(ReportCommand(runs=(path,), no_samples=True))
        assert "base-seed-0/archive/2026" in (path / REPORT).read_text()


@pytest.mark.slow
def test_watch_samples_a_run_until_it_ends(make_run: MakeRun) -> None:
    run = make_run(min_train_tokens=120 * 8 * 32, checkpoint_interval=30, keep_checkpoints=1, validation_interval=30)
    training = start(run, 1, SLOW_STEP=0.2)
    wait_until(lambda: is_locked(run), training)
    watching = launch.start(ROOT / "report.py", str(run), "--watch", "--every", "0.2")
    output, errors = watching.communicate(120)
    assert (watching.returncode, errors) == (0, "")
    assert training.communicate(10) and training.returncode == 0
    assert output.count(REPORT) > 1
    steps = [sample.step for sample in read_samples(run)[0]]
    assert len(steps) > 2 and steps[-1] == 120  # samples of more checkpoints than the run has kept


@pytest.mark.slow
def test_ctrl_c_ends_a_watch_and_keeps_the_report(make_run: MakeRun) -> None:
    run = make_run(min_train_tokens=400 * 8 * 32, checkpoint_interval=30)
    training = start(run, 1, SLOW_STEP=0.05)
    wait_until(lambda: is_locked(run), training)
    watching = launch.start(ROOT / "report.py", str(run), "--watch", "--every", "0.2", "--no-samples")
    wait_until((run / REPORT).exists, watching)
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(30)
    assert watching.returncode == 130 and "interrupted" in errors and (run / REPORT).stat().st_size > 0
    training.send_signal(signal.SIGKILL)
    training.communicate(30)


def test_a_trial_with_the_same_bits_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"text": "same bits", "variants": [{"name": "HEAD", "mean": None, "verdict": "base", "difference": None}]}
    # The first trial still has its short runs. The second one has none.
    for number, folder in enumerate((tmp_path / "probed", tmp_path / "bare")):
        folder.mkdir()
        (folder / "trial.json").write_text(json.dumps(record))
        (folder / "trial.md").write_text("# Trial of HEAD\n\nSame bits in a run shortened to 16 steps.")
        if number == 0:
            (folder / "probes").mkdir()
            for side in ("base", "candidate"):
                write_run(folder / "probes" / f"{side}-short", training(5))
        report(ReportCommand(runs=(folder,), no_samples=True))
        page = (folder / REPORT).read_text()
        assert "Same bits in a run shortened to 16 steps." in page and ("base-short" in page) == (number == 0)
        assert f"report {folder / REPORT}" in capsys.readouterr().out


def test_one_bad_run_does_not_stop_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", training())
    write_run(tmp_path / "new", [started()])
    command = ReportCommand(runs=(tmp_path,), no_samples=True)
    _write(command)
    assert f"NOTE: left out: {tmp_path / 'new' / METRICS}: has no measurements yet" in capsys.readouterr().err
    assert "good" in (tmp_path / REPORT).read_text()
    (tmp_path / REPORT).unlink()
    (write_run(tmp_path / "damaged", training()) / "model.json").write_text("{")
    with pytest.raises(BadInput, match=r"left out of the page: .*damaged"):
        _write(command)
    assert "good" in (tmp_path / REPORT).read_text()
