"""A Python without the packages is told in one line; torch's allocator is set before torch is there."""

import os
import subprocess
import sys

import pytest

from common.installation import ALLOCATOR_SETTINGS, use_expandable_segments
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


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "import sys, common.installation as i; sys.exit(i.exit_status(lambda: print('x' * 10**6) or 0))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as head does
    assert (process.stderr.read(), process.wait()) == (b"", 1)
