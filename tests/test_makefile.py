"""`make train` with a fake Python in .venv, which prints its arguments instead of running anything."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FAKE_PYTHON = f"""#!/bin/sh
if [ "$1" = -c ]; then exec "{sys.executable}" "$@"; fi
echo "python $* next=$LOCKSTEP_NEXT"
"""
NOTES = "".join(
    f"make: NOTE: the environment variable {name} is ignored; to use it, run: make train {name}=...\n"
    for name in ("TEXT", "RUN")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in which everything seems installed and prepared. It has a copy of the Makefile and a text."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "token_files" / "quickstart").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    for name in ("book.txt", "requirements.txt", ".venv/installed", "token_files/quickstart/manifest.json"):
        (tmp_path / name).touch()
    return tmp_path


def make(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("TEXT", "RUN", "MAKEFLAGS")}
    command = ["make", "train", *words]
    return subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True, check=False)


def test_exported_text_and_run_change_nothing(folder: Path) -> None:
    for words in ((), ("TEXT=book.txt",)):
        plain = make(folder, *words)
        exported = make(folder, *words, TEXT="other.txt", RUN="other")
        assert (exported.returncode, exported.stdout) == (0, plain.stdout) == (plain.returncode, plain.stdout)
        notes = [line for line in exported.stderr.splitlines(keepends=True) if "NOTE" in line]
        assert notes == NOTES.splitlines(keepends=True)[len(words) :]  # no note for a variable on the command line
        assert "NOTE" not in plain.stderr


def test_text_and_run_come_from_the_command_line(folder: Path) -> None:
    done = make(folder, "TEXT=book.txt", RUN="other")
    assert "prepare_data.py book.txt --tokenizer bytes --output token_files/book " in done.stdout
    assert "train.py runs/book --like runs/quickstart" in done.stdout
    assert "next=make train TEXT=book.txt\n" in done.stdout
    named = make(folder, "TEXT=book.txt", "RUN=mine", TEXT="other.txt").stdout
    assert "train.py runs/mine --like" in named and "next=make train TEXT=book.txt RUN=mine\n" in named
    alone = make(folder, "RUN=mine")
    assert alone.returncode == 2
    assert alone.stderr.splitlines()[0] == (
        "make: RUN names the run directory of your own text; pass the text as well: make train TEXT=... RUN=mine"
    )


def test_recipes_are_not_echoed(folder: Path) -> None:
    training = make(folder, "TEXT=book.txt").stdout.splitlines()
    assert [line.split()[1] for line in training if line.startswith("python ")] == [
        "prepare_data.py",
        "-m",
        "evaluate.py",
    ]
    assert not any("$" in line or "set -eu" in line for line in training)


def test_make_help_lists_the_targets(folder: Path) -> None:
    done = subprocess.run(["make", "help"], cwd=folder, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("make train ") and max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines[3:]] == [
        "test",
        "test-long",
        "test-cuda",
        "first-gpu-hour-dry-run",
        "lint",
        "docs",
        "picture",
        "help",
    ]


@pytest.mark.parametrize("variable", ["text", "TXT", "run", "DATA"])
def test_an_unknown_variable_is_refused(folder: Path, variable: str) -> None:
    done = make(folder, f"{variable}=book.txt")
    assert done.returncode == 2 and not done.stdout
    assert f"{variable} is no variable of this Makefile; for your own text, write: make train TEXT=" in done.stderr
    assert make(folder, "TEXT=book.txt", "BIN=.venv/bin", "PIP_INDEX_URL=http://a/b?c=d").returncode == 0


def test_an_empty_text_is_refused(folder: Path) -> None:
    done = make(folder, "TEXT=")
    assert done.returncode == 2 and "make: TEXT is empty; name a file or a folder" in done.stderr


def test_another_directory_is_suggested_only_if_there_is_one(folder: Path) -> None:
    python = folder / ".venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON.replace('echo "python', 'case "$1" in prepare_data.py) exit 1;; esac\necho "python'))
    advice = "make: to start in another directory: make train TEXT=... RUN=mine"
    done = make(folder, "TEXT=book.txt")
    assert done.returncode == 2 and advice not in done.stderr
    (folder / "token_files" / "book").mkdir()
    done = make(folder, "TEXT=book.txt")
    assert done.returncode == 2 and advice in done.stderr and "train.py" not in done.stdout
