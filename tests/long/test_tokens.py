"""Fifty kills of a preparation, under changing workers and executors: `make test-long`."""

import subprocess
from pathlib import Path

import pytest

from tests.tokens.prepare.conftest import corpus, undisturbed
from tests.tokens.prepare.test_executors import cluster
from tests.tokens.preparing import files_of, kill_again_and_again

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
__all__ = ["cluster", "corpus", "undisturbed"]  # fixtures


def test_fifty_kills_of_a_preparation_change_nothing(
    cluster: "subprocess.Popen[str]", corpus: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    assert cluster.stdout is not None
    address = cluster.stdout.readline().strip()
    log = kill_again_and_again([str(corpus)], tmp_path / "out", undisturbed, kills=50, ray_address=address)
    assert len(log) == 50
    print(f"50 kills: {files_of(tmp_path / 'out')}, as undisturbed: {files_of(tmp_path / 'out') == undisturbed}")
    assert files_of(tmp_path / "out") == undisturbed
