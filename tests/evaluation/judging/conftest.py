"""Fixtures: a scripted judge server, and answers of two models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evaluation.judging.sessions import Result, Sessions, quality, sessions_in
from tests.judge_server import Judge, serve


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr("evaluation.judging.client.LONGEST_PAUSE_SECONDS", 0.05)
    with serve(quality) as judge:
        yield judge


@pytest.fixture
def sessions(tmp_path: Path, server: Judge) -> Sessions:
    return sessions_in(tmp_path, server)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return the result of a session without faults."""
    with serve(quality) as server:
        sessions = sessions_in(tmp_path_factory.mktemp("faultless"), server)
        sessions.said()
    return sessions.result()
