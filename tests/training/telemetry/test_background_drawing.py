"""Background drawing: a report that hangs, crashes or cannot start changes neither a run's bits nor its end."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from reporting.samples.sample_log import read_samples
from tests.conftest import ROOT, metrics, train
from training.telemetry import background_drawing
from training.telemetry.background_drawing import LEAST_SECONDS, BackgroundDrawing
from training.telemetry.metrics_log import REPORT

HASHES = ("--hash-every", "4")
REPORTS = {
    "hangs": "import os, time; print(os.getpid(), file=open('{pid}', 'a')); time.sleep(600)",
    "crashes": "raise MemoryError('of the report')",
    "ignores signals": (
        "import os, signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "print(os.getpid(), file=open('{pid}', 'a')); time.sleep(600)"
    ),
}


def script_with_report(folder: Path, report: str) -> Path:
    """Return train.py with another report.py, and little patience at the end."""
    folder.mkdir()
    (folder / "report.py").write_text(report)
    script = folder / "train_with_report.py"
    script.write_text(
        "import runpy\n"
        "from pathlib import Path\n"
        "import training.build\n"
        "from training.telemetry import background_drawing\n"
        f"training.build.ROOT = Path({str(folder)!r})\n"
        "training.build.REPORT_SECONDS = 2.0\n"
        "background_drawing.LEAST_SECONDS = 0.0\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    return script


def test_a_chart_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_drawing, "LAST_SECONDS", 0.1)
    drawing = BackgroundDrawing(name="chart", file=tmp_path, arguments=["-c", "import time; time.sleep(600)"])
    assert drawing.finish() is False and drawing.finish() is False
    assert drawing._process is not None and drawing._process.poll() is None
    drawing._process.kill()
    drawing._process.wait()


@pytest.mark.slow
def test_a_run_has_the_same_bits_with_reports_and_ends_with_the_last_one(make_run: Callable[..., Path]) -> None:
    plain, reported = make_run("plain"), make_run("reported")
    assert train(plain, *HASHES).returncode == 0
    done = train(reported, *HASHES, "--report-every", "4", ranks=2)
    assert done.returncode == 0, done.stderr
    assert metrics(plain, "state_sha256") == metrics(reported, "state_sha256") != {}
    assert done.stdout.count(f"report {reported / REPORT}") >= 1
    page = (reported / REPORT).read_text()
    assert "<span>complete</span>" in page and "No job of this run has ended yet" not in page
    assert [sample.step for sample in read_samples(reported)][-1] == 8
    assert not (plain / REPORT).exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(REPORTS))
def test_a_report_that_fails_ends_no_run_and_does_not_outlive_it(
    make_run: Callable[..., Path], tmp_path: Path, fault: str
) -> None:
    plain, reported = make_run("plain"), make_run("reported")
    assert train(plain, *HASHES).returncode == 0
    pids = tmp_path / "pids"
    script = script_with_report(tmp_path / "scripts", REPORTS[fault].format(pid=pids))
    done = train(reported, *HASHES, "--report-every", "4", script=script)
    assert done.returncode == 0, done.stderr
    assert metrics(plain, "state_sha256") == metrics(reported, "state_sha256") != {}
    assert "training-run-chart.png, no report\n" in done.stdout
    assert (fault == "crashes") == ("MemoryError: of the report" in done.stderr)
    for pid in map(int, pids.read_text().split() if pids.exists() else ()):
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            raise AssertionError("a report has outlived its run")


def test_drawings_are_due_after_so_many_steps_and_one_runs_at_a_time(tmp_path: Path) -> None:
    drawing = BackgroundDrawing(
        name="report",
        file=tmp_path / "x",
        arguments=["-c", "import time; time.sleep(600)"],
        every_steps=100,
        finish_seconds=0.1,
    )
    drawing._began -= LEAST_SECONDS
    drawing.redraw(99)
    assert drawing._process is None
    drawing.redraw(150)
    first = drawing._process
    assert first is not None
    drawing._began -= LEAST_SECONDS
    drawing.redraw(400)
    assert drawing._process is first and drawing._step == 150
    began = time.monotonic()
    assert drawing.finish() is False
    assert time.monotonic() - began < 60
    assert first.returncode == -signal.SIGKILL and drawing._process is not first
    assert drawing._process is not None and drawing._process.returncode == -signal.SIGKILL


def test_a_drawing_is_no_rank_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code = f"import os; open({str(tmp_path / 'x')!r}, 'w').write(' '.join(os.environ))"
    drawing = BackgroundDrawing(name="report", file=tmp_path / "x", arguments=["-c", code])
    assert drawing.finish() is True
    variables = (tmp_path / "x").read_text().split()
    assert "PATH" in variables and not {"RANK", "WORLD_SIZE"} & set(variables)
