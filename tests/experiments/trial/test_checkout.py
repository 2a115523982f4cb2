"""Checkouts: commits, the working tree with what is new in it, and what git says of neither."""

import subprocess
from pathlib import Path

import pytest

from common.errors import BadInput
from experiments.trial import checkout
from experiments.trial.checkout import changed_files, check_out, tree_of


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit and two changes in its working tree, one of them a new file."""
    project = tmp_path / "project"
    (project / "token_files").mkdir(parents=True)
    (project / "train.py").write_text("first")
    (project / ".gitignore").write_text("/token_files/\n/trials/\n")
    git(project, "init", "-q")
    git(project, "add", "--all")
    git(project, "commit", "-qm", "first")
    (project / "train.py").write_text("second")
    (project / "new ü.py").write_text("new")
    monkeypatch.setattr(checkout, "ROOT", project)
    return project


def test_the_working_tree_is_checked_out_with_new_files_and_the_projects_tokens(project: Path, tmp_path: Path) -> None:
    base, candidate = tree_of("HEAD"), tree_of(".")
    assert base == git(project, "rev-parse", "HEAD^{tree}") != candidate == tree_of(".")
    assert changed_files(base, candidate) == ["new ü.py", "train.py"]
    for name, tree in (("base", base), ("candidate", candidate)):
        check_out(tree, project / "trials" / "code" / name)
    code = project / "trials" / "code"
    assert [(code / name / "train.py").read_text() for name in ("base", "candidate")] == ["first", "second"]
    assert (code / "candidate" / "token_files").resolve() == project / "token_files"
    assert tree_of(".") == candidate and git(project, "status", "--porcelain").splitlines() == [
        *("M train.py", '?? "new \\303\\274.py"')
    ]  # what a trial writes is ignored, and nothing is staged


def test_a_checkout_that_was_killed_is_made_again(project: Path) -> None:
    (left := project / "code" / ".left" / "files").mkdir(parents=True)
    (left / "left.py").write_text("by a kill")
    for _ in range(2):
        check_out(tree_of("HEAD"), project / "code" / "base")
        assert sorted(path.name for path in (project / "code" / "base").iterdir()) == [
            *(".gitignore", "token_files", "train.py")
        ]


def test_unknown_revisions_and_a_folder_outside_git_are_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision in ("nowhere", "--help", "", "HEAD:train.py"):
        with pytest.raises(BadInput, match="no such git revision; wanted a commit, branch or tag, or"):
            tree_of(revision)
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    with pytest.raises(BadInput, match="not a git repository"):
        tree_of("HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="git: not installed"):
        tree_of("HEAD")
