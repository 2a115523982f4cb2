"""Run record: what `resolved.json` and a checkpoint keep of a run."""

from pathlib import Path
from typing import Any

import pytest

from common.structure import structured
from tests import launch
from tests.conftest import ROOT
from training.checkpoints.run_record import RunRecord, with_stream_list

STREAM = {"directory": "tokens", "tokens": 100, "files": ["train.safetensors"], "sha256": ["a"], "plan": None}
OLDEST = {"model": {"emb_dim": 8}, "train": {}, "global_batch_size": 8, "numerics": {"determinism": "run"}}


def read_record(values: dict[str, Any]) -> RunRecord:
    return structured(with_stream_list(values), RunRecord, unknown_keys=True)


@pytest.mark.parametrize("streams", [STREAM, [STREAM, STREAM | {"tokens": None}]])
def test_a_record_is_written_as_it_was_read(streams: Any) -> None:
    recorded = {"accumulation": 1, "world_size": 2, "steps": 9, "shares": [[0, [1, 1]]], "sources": []}
    described = {"train_stream": streams, "validation_stream": streams}
    others = {"git_commit": "c", "self_test": {"held": True}, "initial_weights": {"source": "gpt2", "sha256": "d"}}
    others |= {"changes": [{"step": 5, "key": "learning_rate", "old": 0.1, "new": 0.2}], "exact_percent": True}
    values = OLDEST | recorded | described | others
    assert read_record(values).to_json() == values


@pytest.mark.parametrize(
    "change", [{"model": []}, {"numerics": {}}, {"train_stream": {"tokens": "many", "sha256": []}}, {"train_stream": 1}]
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(model|numerics|train_streams)\b.*: "):
        read_record(OLDEST | change)


def test_a_full_disk_at_a_start_is_one_line(copied: Path) -> None:
    before = (copied / "resolved.json").read_text()
    done = launch.run(
        ROOT / "train.py", str(copied), "--device", "cpu", "--resume", "step-00000004", ranks=2, file_bytes=500
    )
    assert done.returncode == 1
    assert f"train.py: {copied / 'resolved.json'}: cannot be written: File too large; make room" in done.stderr
    assert 'train.py", line' not in done.stderr
    assert (copied / "resolved.json").read_text() == before
