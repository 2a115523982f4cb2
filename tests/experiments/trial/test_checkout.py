"""Commits and the working tree, with the new files that it needs, can be checked out. Anything else is an error."""

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import BadInput
from common.files import partial_directory, publish_folder
from experiments.trial import checkout
from experiments.trial.checkout import Snapshots
from tests import launch
from tests.conftest import KILLED


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit. Its working tree has a changed file, which needs a new file."""
    project = tmp_path / "project"
    (project / "token_files").mkdir(parents=True)
    (project / "train.py").write_text("first")
    (project / ".gitignore").write_text("/token_files\n/trials\n")
    git(project, "init", "-q")
    git(project, "add", "--all")
    git(project, "commit", "-qm", "first")
    (project / "train.py").write_text("import neü")
    (project / "neü.py").write_text("new")
    monkeypatch.setattr(checkout, "ROOT", project)
    return project


@pytest.fixture
def snapshots(project: Path) -> Iterator[Snapshots]:
    with Snapshots() as opened:
        yield opened


def objects_of(project: Path) -> list[Path]:
    return sorted((project / ".git" / "objects").rglob("*"))


def test_a_checkout_has_new_files_and_tokens(project: Path, snapshots: Snapshots) -> None:
    base, candidate = snapshots.tree_of("HEAD"), snapshots.tree_of(".")
    assert base == git(project, "rev-parse", "HEAD^{tree}") != candidate == snapshots.tree_of(".")
    assert snapshots.changed_files(base, candidate) == ["neü.py", "train.py"]
    for name, tree in (("base", base), ("candidate", candidate)):
        snapshots.check_out(tree, project / "trials" / "code" / name)
    code = project / "trials" / "code"
    assert [(code / name / "train.py").read_text() for name in ("base", "candidate")] == ["first", "import neü"]
    assert (code / "candidate" / "token_files").resolve() == project / "token_files"
    assert snapshots.tree_of(".") == candidate and git(project, "status", "--porcelain").splitlines() == [
        *("M train.py", '?? "ne\\303\\274.py"')
    ]  # git ignores the trial's files, and the trial has staged nothing


def test_a_trial_adds_nothing_to_the_repository(project: Path) -> None:
    before = objects_of(project)
    with Snapshots() as snapshots:
        tree = snapshots.tree_of(".")
        snapshots.check_out(tree, project / "trials" / "code" / tree)
    assert objects_of(project) == before and (project / "trials" / "code" / tree / "neü.py").exists()


def test_unrelated_new_files_do_not_change_the_candidate(project: Path, snapshots: Snapshots) -> None:
    candidate = snapshots.tree_of(".")
    (project / "runs" / "mine").mkdir(parents=True)
    for name in ("runs/mine/train.json", "notes.txt", "scratch.py", "large.bin"):
        (project / name).write_text("other")
    with (project / "large.bin").open("wb") as file:
        file.truncate(1 << 40)
    assert snapshots.tree_of(".") == candidate
    assert snapshots.left_out == ["large.bin", "notes.txt", "runs/mine/train.json", "scratch.py"]
    (note,) = checkout.describe_left_out(snapshots.left_out)
    assert note.startswith("4 new files in the working tree are not part of the trial")
    assert "and 1 more. To include" in note
    git(project, "add", "notes.txt")  # a staged file is always part of the snapshot
    assert "notes.txt" in snapshots.changed_files(candidate, snapshots.tree_of("."))


def test_large_files_are_refused_by_name_and_size(project: Path, snapshots: Snapshots) -> None:
    (project / "train.py").write_text("import neü; open('weights.bin')")
    with (project / "weights.bin").open("wb") as file:
        file.truncate(40_000_000)
    before = objects_of(project)
    with pytest.raises(BadInput) as error:
        snapshots.tree_of(".")
    assert "3 files of 40.0 MB that are not committed. A trial copies them, and at most 32 MB" in str(error.value)
    assert "to .gitignore: weights.bin (40.0 MB), train.py (0.0 MB), neü.py (0.0 MB)" in str(error.value)
    assert objects_of(project) == before


CHECK_OUT = """
import sys
from pathlib import Path
from experiments.trial import checkout
checkout.ROOT = Path(sys.argv[1])
with checkout.Snapshots() as snapshots:
    snapshots.check_out(snapshots.tree_of("HEAD"), Path(sys.argv[2]))
"""


@pytest.fixture
def check_out(project: Path) -> Path:
    """Return a script that writes the files of HEAD into a folder."""
    script = project.parent / "check_out.py"
    script.write_text(CHECK_OUT)
    return script


def test_a_killed_checkout_is_repeated(project: Path, snapshots: Snapshots, check_out: Path) -> None:
    folder = project / "code" / "base"
    killed = launch.run(KILLED, str(check_out), str(project), str(folder), environment={"KILL_AT": str(folder)})
    assert killed.returncode == -signal.SIGKILL
    [partial] = folder.parent.iterdir()
    assert partial != folder and (partial / "train.py").read_text() == "first"
    (partial / "left.py").touch()
    for _ in range(2):
        snapshots.check_out(snapshots.tree_of("HEAD"), folder)
        assert [path.name for path in folder.parent.iterdir()] == ["base"]
        assert sorted(path.name for path in folder.iterdir()) == [".gitignore", "token_files", "train.py"]


def test_a_full_disk_leaves_no_checkout(project: Path, check_out: Path) -> None:
    (project / "train.py").write_text("x" * 10_000)
    git(project, "add", "--all")
    git(project, "commit", "-qm", "second")
    folder = project / "code" / "base"
    full = launch.run(check_out, str(project), str(folder), file_bytes=5_000)
    assert f"BadInput: {folder}: cannot be written: File too large; make room" in full.stderr
    assert [*folder.parent.iterdir()] == []


def test_trials_share_checkouts(project: Path, snapshots: Snapshots) -> None:
    tree, folder = snapshots.tree_of("HEAD"), project / "code" / "base"
    with partial_directory(folder, "taken") as partial:  # the first trial
        second = threading.Thread(target=snapshots.check_out, args=(tree, folder))
        second.start()
        time.sleep(0.1)
        (partial / "by the first").touch()
        publish_folder(partial, folder)
    second.join()
    assert [path.name for path in folder.iterdir()] == ["by the first"]
    assert [path.name for path in folder.parent.iterdir()] == ["base"]


def test_json_is_read_without_a_checkout(project: Path, snapshots: Snapshots) -> None:
    (project / "train.py").write_text('{"a": 1}')
    assert snapshots.read_json(snapshots.tree_of("."), "train.py") == {"a": 1}
    assert snapshots.read_json(snapshots.tree_of("HEAD"), "nowhere/train.json") is None
    with pytest.raises(BadInput, match=r"train.py of \w{8}: not JSON"):
        snapshots.read_json(snapshots.tree_of("HEAD"), "train.py")


def test_unknown_revisions_and_a_folder_outside_git_are_refused(
    project: Path, snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision in ("nowhere", "--help", "", "HEAD:train.py"):
        with pytest.raises(BadInput, match="no such git revision; pass a commit, branch or tag, or"):
            snapshots.tree_of(revision)
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    with pytest.raises(BadInput, match="not a git repository"), Snapshots():
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="git: not installed"), Snapshots():
        pass
