"""Variables of the Makefile: `make train` with a fake Python in .venv, which prints its arguments."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

STAND_IN = f"""#!/bin/sh
if [ "$1" = -c ]; then exec "{sys.executable}" "$@"; fi
echo "python $* next=$LOCKSTEP_NEXT"
"""
NOTES = "".join(
    f"make: NOTE: {name} of the environment is not used; if you mean it: make train {name}=...\n"
    for name in ("TEXT", "RUN")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a copy of the Makefile and a text, in which everything seems to be installed and prepared."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "token_files" / "quickstart").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(STAND_IN)
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
        # Variables on the command line are used, without a note.
        assert notes == NOTES.splitlines(keepends=True)[len(words) :]
        assert "NOTE" not in plain.stderr


def test_text_and_run_come_from_the_command_line(folder: Path) -> None:
    done = make(folder, "TEXT=book.txt", RUN="other")
    assert "prepare_data.py book.txt --tokenizer bytes --output token_files/book " in done.stdout
    assert "train.py runs/book --like runs/quickstart" in done.stdout
    assert "next=make train TEXT=book.txt\n" in done.stdout
    named = make(folder, "TEXT=book.txt", "RUN=mine", TEXT="other.txt").stdout
    assert "train.py runs/mine --like" in named and "next=make train TEXT=book.txt RUN=mine\n" in named
    alone = make(folder, "RUN=mine")
    assert alone.returncode == 2 and "RUN names the directory of your own text" in alone.stderr
