"""The record of a run, resolved.json: what it must not hold."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.checkpoints.run_record import RESOLVED, write_record


def test_a_runs_record_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = "curl -H 'Authorization: Bearer hunter2' https://host/done"
    monkeypatch.setattr(sys, "argv", ["train.py", "runs/x", "--then", then, "--init-from", "https://me:hunter2@host"])
    monkeypatch.setattr("training.checkpoints.run_record.environment", lambda *_: {})
    record: Any = SimpleNamespace(to_json=dict)
    tokens: Any = SimpleNamespace(directories=[SimpleNamespace(path=tmp_path)], tokenizer=None)
    write_record(tmp_path, record, tokens, SimpleNamespace(device=torch.device("cpu"), world_size=1), None)  # type: ignore[arg-type]
    text = (tmp_path / RESOLVED).read_text()
    assert "runs/x" in text and "hunter2" not in text
