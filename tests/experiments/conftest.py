"""Small sweeps and ladders: a tiny run, and a file that describes an experiment with this run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeSweep = Callable[..., Path]
MakeLadder = Callable[..., Path]


@pytest.fixture
def make_sweep(make_run: Callable[..., Path], tmp_path: Path) -> MakeSweep:
    """Return a function that writes a sweep file for a tiny base. Its keyword arguments are keys of the file."""

    def make(base: Path | None = None, **keys: Any) -> Path:
        levers = {"train.learning_rate": [0.01, 0.05]}
        values = {"base": str(base or make_run("base")), "levers": levers, "seeds": 2} | keys
        (file := tmp_path / "sweep.json").write_text(json.dumps(values))
        return file

    return make


@pytest.fixture
def make_ladder(make_run: Callable[..., Path], tmp_path: Path) -> MakeLadder:
    """Return a function that writes a ladder file for a tiny target. Its keyword arguments are keys of the file."""

    def make(target: Path | str | None = None, **keys: Any) -> Path:
        values = {
            "target": str(target or make_run("target", min_train_tokens=20_000)),
            "sizes": [{"n_layers": 1, "emb_dim": width} for width in (8, 12, 16, 24)],
            "tokens_per_parameter": [0.5, 1],
            "rates": [0.005, 0.01, 0.02],
            "set": {"train.max_epochs": 999},
        } | keys
        (file := tmp_path / "ladder.json").write_text(json.dumps(values))
        return file

    return make
