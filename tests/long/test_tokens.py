"""Fifty kills of a preparation, under changing workers and executors: `make test-long`."""

from pathlib import Path

import pytest

from tests.tokens.test_prepare import corpus, files_of, kill_again_and_again, undisturbed

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
__all__ = ["corpus", "undisturbed"]  # fixtures


def test_fifty_kills_of_a_preparation_change_nothing(corpus: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    log = kill_again_and_again(corpus, tmp_path / "out", undisturbed, kills=50)
    assert len(log) == 50
    print(f"50 kills: {files_of(tmp_path / 'out')}, as undisturbed: {files_of(tmp_path / 'out') == undisturbed}")
    assert files_of(tmp_path / "out") == undisturbed
