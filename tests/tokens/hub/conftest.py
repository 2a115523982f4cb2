"""A prepared token directory, a hub on loopback, and pushes to it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import TOKEN, Hub, environment, serve
from tests.tokens.preparing import PREPARE, jsonl, run, write

NAME = "owner/tokens"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Return a finished directory, made from a folder whose name is nobody's business."""
    folder = tmp_path / "secret-client"
    folder.mkdir()
    source = jsonl(folder / "letters.jsonl", [f"letter {number}" for number in range(300)] + [None])  # type: ignore[list-item]
    write(tmp_path / "out", source, validation_fraction=0.1, unit_bytes=1000)
    return tmp_path / "out"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve({}) as server:
        server.new = tmp_path / "hub"
        yield server


def push(hub: Hub, *options: str | Path, token: str | None = TOKEN) -> "subprocess.CompletedProcess[str]":
    return run(PREPARE, "push", *options, **environment(hub, token))


def published(hub: Hub) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in hub.datasets[NAME].iterdir()}


def refusal(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]
