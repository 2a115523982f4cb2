"""The deadline of .ci/run, with a Makefile whose tests take seconds."""

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import slow
from tests.launch import ROOT, execute

MAKEFILE = """
.venv/installed-test lint test .venv-cuda-2.13/installed first-gpu-hour-dry-run:
\t@echo ran $@
test-long:
\t@echo tests/test_a.py::test_one >> $$REACHED_TESTS
\t@{long}
\t@printf '%s\\n' 'tests/test_a.py::test_two' 'tests/test_b.py::test_three[x y]' >> $$REACHED_TESTS
"""
COLLECTED = ("tests/test_a.py::test_one", "tests/test_a.py::test_two", "tests/test_b.py::test_three[x y]")
FAILED = "echo FAILED tests/test_a.py::test_two >> $$REACHED_TESTS"


@pytest.mark.parametrize(
    ("seconds", "long", "status", "not_reached"),
    [
        (600, "true", 0, None),
        (600, "false", 2, None),
        *slow((20, "sleep 600", 0, ["1 tests/test_a.py", "1 tests/test_b.py"])),
        *slow((20, f"{FAILED}; sleep 600", 124, None)),
        (0, "false", 0, ["2 tests/test_a.py", "1 tests/test_b.py"]),
    ],
)
def test_long_tests_name_what_they_did_not_reach(
    tmp_path: Path, seconds: int, long: str, status: int, not_reached: list[str] | None
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    for folder in (tmp_path / ".ci", python.parent):
        folder.mkdir(parents=True)
    shutil.copy2(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(MAKEFILE.format(long=long))
    for tool, text in ((python, "\n".join(COLLECTED)), (python.with_name("chromium"), "")):
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\n\n3 tests collected\nEND\n")
        tool.chmod(0o755)
    environment = {"CI_SECONDS": str(seconds), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = execute(tmp_path / ".ci" / "run", **environment)
    assert done.returncode == status, done.stderr
    for target in ("lint", "test", "first-gpu-hour-dry-run"):
        assert f"ran {target}\n" in done.stdout
    heading, _, named = done.stdout.rpartition("Not reached, tests by file:\n")
    assert (not_reached is None) == (not heading)
    assert ("FAILED tests/test_a.py::test_two\n" in done.stdout) == (status == 124)
    assert not_reached is None or [line.strip() for line in named.splitlines()] == not_reached
