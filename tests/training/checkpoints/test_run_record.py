"""The record of a run, resolved.json: what it must not hold."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import BadInput
from tokens.format.manifest import RANKS_FILE
from training.checkpoints.run_record import RESOLVED, read_record, write_record


def write(run: Path, tokens: Any) -> None:
    record: Any = SimpleNamespace(to_json=lambda: {"numerics": {}})
    write_record(run, record, tokens, SimpleNamespace(device=torch.device("cpu"), world_size=1), None)  # type: ignore[arg-type]


def test_a_runs_record_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = "curl -H 'Authorization: Bearer hunter2' https://host/done"
    monkeypatch.setattr(sys, "argv", ["train.py", "runs/x", "--then", then, "--init-from", "https://me:hunter2@host"])
    monkeypatch.setattr("training.checkpoints.run_record.environment", lambda *_: {})
    tokens: Any = SimpleNamespace(directories=[SimpleNamespace(path=tmp_path)], tokenizer=None)
    write(tmp_path, tokens)
    text = (tmp_path / RESOLVED).read_text()
    assert "runs/x" in text and "hunter2" not in text


def test_a_users_files_in_a_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.checkpoints.run_record.environment", lambda *_: {})
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / RANKS_FILE).write_text("the ranks of the tokens")
    recorded = SimpleNamespace(ranks_file=RANKS_FILE, as_json=dict)
    directory = SimpleNamespace(path=tmp_path / "tokens")
    tokens: Any = SimpleNamespace(directories=[directory], tokenizer=(tmp_path / "tokens", recorded))
    (run := tmp_path / "run").mkdir()
    for name, what in ((RESOLVED, "the record of a run"), (RANKS_FILE, "the tokenizer of the run's tokens")):
        (run / name).write_text("a user's file")
        with pytest.raises(BadInput, match=rf"{name}: is not {what}, and is left as it is \(13 bytes\); move it away"):
            write(run, tokens)
        assert (run / name).read_text() == "a user's file"
        (run / name).unlink()
    write(run, tokens)
    (tmp_path / "tokens" / RANKS_FILE).write_text("other ranks, of tokens that were prepared again")
    write(run, tokens)  # the copy of an earlier job is replaced
    assert (run / RANKS_FILE).read_text() == "other ranks, of tokens that were prepared again"


@pytest.mark.parametrize(
    "wrong", [{"global_batch_size": 0}, {"steps": -1}, {"world_size": 0}, {"accumulation": 1.5}, {"steps": True}]
)
def test_a_damaged_record_of_a_run_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    values = {"model": {}, "train": {}, "global_batch_size": 8, "numerics": {"determinism": "run"}, "steps": 9}
    (tmp_path / RESOLVED).write_text(json.dumps(values))
    assert read_record(tmp_path) is not None
    (tmp_path / RESOLVED).write_text(json.dumps(values | wrong))
    with pytest.raises(
        BadInput, match=rf"{RESOLVED}: damaged or edited: {next(iter(wrong))}: got .*; copy it here again"
    ):
        read_record(tmp_path)
