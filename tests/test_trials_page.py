"""The loop in docs/trials.md is run exactly as the page prints it, and must delete only files that it created."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.trial.test_checkout import git
from tests.launch import ROOT

# Exit statuses of the fake experiment.py, in order: two candidates are kept, one is refused for each possible reason,
# and at the end the budget is spent.
STATUSES = (0, 1, 10, 0, 11, 12, 75)
UNTRACKED = ("runs/mine/model.json", "runs/mine/train.json", "runs/mine/checkpoints/latest/model.safetensors")
IGNORED = ("sweeps/mine.json", "export/model.safetensors", "conversation.txt", "token_files/own/train.safetensors")
TRIAL = f"""
import pathlib, sys
count = len(list(pathlib.Path("trials").glob("count-*")))
pathlib.Path("trials", "count-" + str(count)).touch()
print("Verdict " + str(count) + ".", "a table", sep=chr(10))
sys.exit({STATUSES}[count])
"""
PROPOSE = """#!/bin/sh
count=$(ls trials | wc -l)
echo "$count" > model.py
echo new > "new-$count.py"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a repository with a fake experiment.py, and with files of the user that git does not track."""
    project = tmp_path / "project"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "activate").write_text("")
    (project / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    (project / "model.py").write_text("first")
    (project / "experiment.py").write_text(TRIAL)
    git(project, "init", "-q")
    git(project, "config", "user.name", "t")
    git(project, "config", "user.email", "t@example.org")
    git(project, "add", "--all")
    git(project, "commit", "-qm", "first")
    for name in (*UNTRACKED, *IGNORED):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("mine")
    (project / "model.py").write_text("changed by the user")
    return project


def run_loop(project: Path) -> subprocess.CompletedProcess[str]:
    """Run the loop from docs/trials.md in a project, with a program that proposes changes."""
    [loop] = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "trials.md").read_text(), re.DOTALL)
    tools = project.parent / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "propose_a_change").write_text(PROPOSE)
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(tools)}
    return subprocess.run(["sh", "-c", loop], cwd=project, env=environment, capture_output=True, text=True, check=False)


def files_of(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_the_documented_loop_deletes_only_its_files(project: Path) -> None:
    before, head = files_of(project), git(project, "rev-parse", "HEAD")
    completed = run_loop(project)
    assert completed.returncode == 0, completed.stderr
    counts = {f"trials/count-{number}": "" for number in range(len(STATUSES))}
    assert files_of(project) == before | counts and git(project, "rev-parse", "HEAD") == head
    worktree = project.parent / "lockstep-loop"
    subjects = git(worktree, "log", "--format=%s").splitlines()
    assert subjects == ["candidate", "Verdict 3.", "Verdict 0.", "first"]  # the last trial has not ended
    assert sorted(path.name for path in worktree.glob("new-*.py")) == ["new-0.py", "new-3.py", "new-6.py"]
    assert git(project, "reflog", "loop", "--format=%s").splitlines().count("candidate") == len(STATUSES)
    git(project, "worktree", "remove", str(worktree))
    assert files_of(project) == before | counts


def test_the_loop_does_nothing_without_a_worktree(project: Path) -> None:
    (project.parent / "lockstep-loop").mkdir()
    (project.parent / "lockstep-loop" / "mine").write_text("mine")
    before = files_of(project.parent)
    completed = run_loop(project)
    assert completed.returncode != 0 and "already exists" in completed.stderr
    after = {name: text for name, text in files_of(project.parent).items() if not name.startswith("tools/")}
    assert after == before and len(git(project, "log", "--format=%s").splitlines()) == 1
