"""Environment of a run: its commit is unknown without git."""

import pytest

from training.hardware.environment import git_commit


def test_there_is_no_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    git_commit.cache_clear()
    assert git_commit() is None
    git_commit.cache_clear()
