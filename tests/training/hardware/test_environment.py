"""The recorded environment of a run: without git, the commit is unknown."""

import pytest

from training.hardware.environment import git_commit


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    git_commit.cache_clear()
    assert git_commit() is None
    git_commit.cache_clear()
