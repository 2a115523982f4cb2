"""Output: severity decides where a line goes; failed advisory work and lost output do not end a run."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from common import output
from common.output import advisory, newly_dropped, note, progress, show, warning
from tests.conftest import ROOT

COMMAND = """
import sys
from common import output
from common.script import Script
with Script("script.py") as script:
    {first}
    print("\\udc80" + "x" * 10**5)
    print("work is done", file=sys.stderr)
sys.exit(script.status)
"""
INCOMPLETE = "-c: stdout: No space left on device: the output of this command is incomplete"


def test_failed_advisory_work_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_dropped", {})
    for divisor in (1, 0, 0):
        with advisory("prices"):
            assert 1 / divisor == 1
    [(name, problem)] = newly_dropped()
    assert name == "prices" and problem.startswith("ZeroDivisionError in test_output.py:")
    assert capsys.readouterr().err == f"WARNING: prices: dropped: {problem}\n"
    assert [*newly_dropped()] == []
    with pytest.raises(KeyError), advisory("heartbeat", KeyError):
        raise KeyError


def test_severity_decides_where_a_line_goes(capsys: pytest.CaptureFixture[str]) -> None:
    show("WARNING: is a word of this result", note("a\x1b"), warning("token=abcdef0123456789abcdef"))
    printed = capsys.readouterr()
    assert printed.out == "WARNING: is a word of this result\n"
    assert printed.err == "NOTE: a\\x1b\nWARNING: token=[secret]\n"


def test_rank_0_prints_lines_with_warnings_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1", "12"):
        monkeypatch.setenv("RANK", rank)
        show("resuming", warning("numerics changed"), once=True)
    show("of this rank alone")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("resuming\nof this rank alone\n", "WARNING: numerics changed\n")


def test_lines_are_printed_above_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=4, bar_format="{n_fmt} of {total_fmt}", file=terminal) as bar:
        bar.update(2)
        show(note("first"), progress("second"))
        bar.update(2)
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert lines == ["NOTE: first", "second", "4 of 4", ""]


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize(
    ("streams", "status", "errors"),
    [
        ("> /dev/null", 0, ["work is done"]),
        (">&-", 0, ["work is done"]),
        ("2>&-", 0, []),
        ("> /dev/full 2> /dev/full", 1, []),
        ("> /dev/full", 1, ["work is done", INCOMPLETE]),
        ("| true", 1, ["work is done"]),
    ],
)
def test_lost_output_is_an_error_only_for_results(streams: str, status: int, errors: list[str], logs: bool) -> None:
    code = COMMAND.format(first="output.keep_logs_only()" if logs else "")
    command = f"{sys.executable} -c '{code}' {streams}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, check=False)
    lines = [line for line in errors if not (logs and line == INCOMPLETE)]
    assert (done.returncode, done.stderr.decode().splitlines()) == (0 if logs else status, lines)


def test_output_never_goes_into_another_file(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    first = f'import os; os.close(1); kept = open({str(file)!r}, "w"); assert kept.fileno() == 1'
    code = COMMAND.replace("'", '"').format(first=first.replace("'", '"'))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Bad file descriptor" in done.stderr and file.read_bytes() == b""


def test_a_stopped_log_reader_does_not_block() -> None:
    code = COMMAND.format(first="output.READER_SECONDS = 0.1; output.keep_logs_only()")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_help_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "train.py", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "No space left" in done.stderr
