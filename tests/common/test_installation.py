"""A Python without the packages is told in one line; torch's allocator is set before torch; output ends no work."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import EXIT_ERROR, EXIT_INTERRUPTED, BadInput
from common.installation import ALLOCATOR_SETTINGS, run_command, use_expandable_segments
from tests.conftest import ROOT
from tests.test_house import ENTRY_SCRIPTS


@pytest.mark.parametrize("script", ENTRY_SCRIPTS)
def test_a_python_without_the_packages_is_told_how_to_get_them(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bare = [sys.executable, "-S", "-B", script, "runs/quickstart"]  # -S: no site-packages
    done = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{script}: this Python, {sys.executable}, has no module attrs; run: ")
    assert line.endswith("source .venv/bin/activate")


@pytest.mark.parametrize("own", [None, *ALLOCATOR_SETTINGS])
def test_the_allocator_grows_its_segments_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    environment = {} if own is None else {own: "max_split_size_mb:512"}
    monkeypatch.setattr(os, "environ", dict(environment))
    use_expandable_segments()
    assert os.environ == (environment or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


COMMAND = """
import sys
from common import installation
def main():
    installation.prepare_process("x.py")
    {first}
    print("\\udc80" + "x" * 10**5)
    print("work is done", file=sys.stderr)
    return 0
sys.exit(installation.exit_status("script.py", main))
"""
INCOMPLETE = "-c: stdout: No space left on device: what this command has printed is incomplete"


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
def test_lost_output_never_ends_work_and_counts_where_it_is_the_product(
    streams: str, status: int, errors: list[str], logs: bool
) -> None:
    code = COMMAND.format(first="installation.keep_logs_only()" if logs else "")
    command = f"{sys.executable} -c '{code}' {streams}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, check=False)
    lines = [line for line in errors if not (logs and line == INCOMPLETE)]
    assert (done.returncode, done.stderr.decode().splitlines()) == (0 if logs else status, lines)


def test_a_file_that_gets_the_number_of_closed_output_is_not_printed_into(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    first = f'import os; os.close(1); kept = open({str(file)!r}, "w"); assert kept.fileno() == 1'
    code = COMMAND.replace("'", '"').format(first=first.replace("'", '"'))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Bad file descriptor" in done.stderr and file.read_bytes() == b""


def test_the_reader_of_a_log_that_has_stopped_is_not_waited_for() -> None:
    code = COMMAND.format(first="installation.READER_SECONDS = 0.1; installation.keep_logs_only()")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_help_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "train.py", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "No space left" in done.stderr


def test_ctrl_c_while_weights_are_read_is_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")

    def interrupt(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def read() -> None:
        try:
            load_file(tmp_path / "weights")
        except Exception as error:  # as a loader would
            raise BadInput(f"weights: {error}") from error

    monkeypatch.setattr(torch.UntypedStorage, "__len__", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    try:
        assert run_command("evaluate.py", read, "; results are kept") == EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "evaluate.py: interrupted; results are kept\n"
    (tmp_path / "weights").write_bytes(b"damaged")
    assert run_command("evaluate.py", read, "") == EXIT_ERROR
