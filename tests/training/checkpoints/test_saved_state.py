"""`state.json` and the run record in it are read back exactly as written, and edited files are refused.

The manifest detects damage to any file of a checkpoint, and the error names the file.
"""

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.checks import structured
from common.errors import BadInput
from common.files import sha256
from model.config import ModelConfig
from tests.conftest import TINY_MODEL, TINY_TRAIN, forge_manifest, one_line, train
from tests.training.checkpoints.conftest import FILES, flipped
from training.checkpoints.directory import OPTIMIZER, WEIGHTS
from training.checkpoints.run_record import RunRecord, record_fields
from training.checkpoints.saved_state import fields_sha256, parse_state, read_state, verify
from training.config.train_config import TrainConfig

STREAM = {"directory": "tokens", "tokens": 100, "files": ["train.safetensors"], "sha256": ["a"], "plan": None}
SETTINGS = {  # `on_spike` is a key of an earlier version, and no longer exists
    "model": attrs.asdict(ModelConfig(**TINY_MODEL)),
    "train": TrainConfig.from_keys({"dataset": "d", **TINY_TRAIN}).flat() | {"on_spike": "skip"},
}
OLDEST = SETTINGS | {"global_batch_size": 8, "numerics": {"determinism": "run"}}
FORGED: dict[str, list[Any]] = {
    "step": [7, "8", None, -1, True, 8.0, 10**30],
    "optimizer_steps": [7, 9, "8", None],
    "tokens": [1, "x"],
    "elapsed_seconds": ["1", -1, 10**400],
    "best_step": [9, "8"],
    "loss_scale": [None, {"scale": 0, "finite_steps": 0}, {"scale": "1", "finite_steps": 0}],
    "config": [
        None,
        {},
        {"model": {}, "train": {}, "global_batch_size": 8},
        {"model": [], "train": {}, "global_batch_size": 8},
    ],
    "state_sha256": [None, "0" * 64],
    "fields_sha256": ["0" * 64],
}


def test_state_is_written_as_it_was_read(finished: Path) -> None:
    path = finished / "checkpoints" / "step-00000008"
    assert read_state(path).text() == (path / "state.json").read_text()


def test_state_belongs_to_its_step_and_files(copied: Path) -> None:
    directory = copied / "checkpoints"
    digests = {name: sha256(directory / "step-00000008" / name) for name in (WEIGHTS, OPTIMIZER)}
    read_state(directory / "step-00000008", digests)
    read_state((directory / "step-00000008").rename(directory / "kept"), digests)
    with pytest.raises(BadInput, match="state_sha256: does not match"):
        read_state(directory / "kept", digests | {WEIGHTS: "c"})
    (directory / "kept").rename(directory / "step-00000007")
    with pytest.raises(BadInput, match="step: got 8, wanted 7, as in the folder's name"):
        read_state(directory / "step-00000007", digests)


def test_spike_window_of_earlier_versions_is_ignored(finished: Path) -> None:
    values = json.loads((finished / "checkpoints" / "latest" / "state.json").read_text())
    with_window = values | {"guard": {"losses": [1.0], "grad_norms": [2.0], "skipped_steps": 3}}
    with_window["config"] = values["config"] | {"train": values["config"]["train"] | {"on_spike": "skip"}}
    assert parse_state(with_window | {"fields_sha256": fields_sha256(with_window)}).position.step == 8


def test_missing_or_invalid_field_is_named(finished: Path) -> None:
    values = json.loads((finished / "checkpoints" / "latest" / "state.json").read_text())
    for key in ("step", "config", "state_sha256"):
        with pytest.raises(ValueError, match=f"^{key}: missing"):
            parse_state({name: field for name, field in values.items() if name != key})
    streams = {"train_stream": {"tokens": 1, "sha256": 3}}
    for key, value, problem in (
        ("config", values["config"] | streams, "config.train_streams[0].sha256: got 3, wanted an array"),
        ("config", values["config"] | {"model": []}, "config.model: got [], wanted an object"),
        ("loss_scale", [], "loss_scale: got [], wanted an object"),
        ("loss_scale", {"scale": "1", "finite_steps": 0}, "loss_scale.scale: got '1', wanted a number"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            parse_state(values | {key: value})


def test_edited_state_is_refused_despite_a_new_manifest(copied: Path) -> None:
    path = copied / "checkpoints" / "step-00000008"
    intact = json.loads((path / "state.json").read_text())
    for key, values in FORGED.items():
        for value in values:
            (path / "state.json").write_text(json.dumps(intact | {key: value}))
            forge_manifest(path)
            problem = verify(path)
            assert problem is not None and f"{path / 'state.json'}: " in problem, (key, value)


def read_record(values: dict[str, Any]) -> RunRecord:
    return structured(record_fields(values), RunRecord, unknown_keys=True)


@pytest.mark.parametrize("streams", [STREAM, [STREAM, STREAM | {"tokens": None}]])
def test_record_is_written_as_it_was_read(streams: Any) -> None:
    plan = {"accumulation": 1, "world_size": 2, "steps": 9, "shares": [[0, [1, 1]]], "sources": []}
    tokens = {"train_stream": streams, "validation_stream": streams}
    history = {"git_commit": "c", "self_test": {"held": True}, "initial_weights": {"source": "gpt2", "sha256": "d"}}
    history |= {"changes": [{"step": 5, "key": "learning_rate", "old": 0.1, "new": 0.2}]}
    record_json = OLDEST | plan | tokens | history
    assert read_record(record_json).to_json() == record_json


@pytest.mark.parametrize(
    "change", [{"model": []}, {"numerics": {}}, {"train_stream": {"tokens": "many", "sha256": []}}, {"train_stream": 1}]
)
def test_invalid_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(model|numerics|train_streams)\b.*: "):
        read_record(OLDEST | change)


def test_full_disk_at_the_start_gives_one_line(copied: Path) -> None:
    before = (copied / "resolved.json").read_text()
    line = one_line(train(copied, "--resume", "step-00000004", ranks=2, file_bytes=500))
    assert f"train.py: {copied / 'resolved.json'}: cannot be written: File too large; make room" in line
    assert (copied / "resolved.json").read_text() == before


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_detected(copied: Path, name: str) -> None:
    checkpoint = copied / "checkpoints" / "step-00000008"
    assert verify(checkpoint) is None
    file = checkpoint / name
    intact = file.read_bytes()
    generator = random.Random(name)
    positions = range(len(intact)) if len(intact) < 2000 else [generator.randrange(len(intact)) for _ in range(200)]
    damaged = [flipped(intact, position, generator.randrange(8)) for position in positions]
    page = generator.randrange(max(1, len(intact) // 4096)) * 4096
    damaged.append(intact[:page] + bytes(len(intact[page : page + 4096])) + intact[page + 4096 :])
    damaged += [intact[:-1], b"", intact + b"\0"]
    for content in damaged:
        file.write_bytes(content)
        problem = verify(checkpoint)
        assert problem is not None
        assert name in problem
    file.unlink()
    assert name in str(verify(checkpoint))


@pytest.mark.parametrize("name", FILES)
def test_pipe_instead_of_a_file_is_refused(copied: Path, name: str) -> None:
    path = copied / "checkpoints" / "step-00000008"
    (path / name).unlink()
    os.mkfifo(path / name)
    assert str(path / name) in str(verify(path))


def test_deeply_nested_json_is_damage(copied: Path) -> None:
    for name in ("manifest.json", "state.json"):
        path = copied / "checkpoints" / ("step-00000008" if name == "manifest.json" else "step-00000004")
        (path / name).write_text("[" * 100_000)
        forge_manifest(path) if name == "state.json" else None
        assert f"{path / name}: " in str(verify(path))
        assert "nested deeper than 100" in str(verify(path))
