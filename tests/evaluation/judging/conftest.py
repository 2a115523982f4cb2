"""Fixtures: a scripted judge server, and answers of two models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.judging.sessions import PRICES, judge, quality, result, write
from tests.judge_server import Judge, serve


@pytest.fixture
def server() -> Iterator[Judge]:
    with serve(quality) as judge:
        yield judge


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "prices.json").write_text(json.dumps(PRICES))
    return [write(tmp_path, "good", 60), write(tmp_path, "poor", 40)]


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a session without faults finds."""
    folder = tmp_path_factory.mktemp("faultless")
    (folder / "prices.json").write_text(json.dumps(PRICES))
    files = [write(folder, "good", 60), write(folder, "poor", 40)]
    with serve(quality) as server:
        done = judge(server, files)
    assert done.returncode == 0, done.stderr
    return result(files[0])
