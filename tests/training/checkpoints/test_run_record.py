"""resolved.json, the record of a run: it contains no secrets, and its values are checked when it is read again."""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import BadInput, InvalidValue
from model.config import ModelConfig
from tokens.format.manifest import RANKS_FILE
from tokens.tokenizer.loading import load_tokenizer, record_of
from training.checkpoints.compatibility import differences
from training.checkpoints.run_record import (
    RESOLVED,
    JobEnvironment,
    JobRecord,
    RunRecord,
    read_job,
    read_record,
    write_record,
)
from training.config.train_config import TrainConfig

# A record from a version that had fewer keys
EARLIER: dict[str, Any] = {
    "model": {"vocab_size": 257, "context_length": 32, "emb_dim": 16, "n_heads": 2, "n_layers": 2},
    "train": {"dataset": "d", "microbatch_size": 2, "learning_rate": 0.01},
    "global_batch_size": 8,
    "numerics": {"determinism": "run"},
    "steps": 9,
}


def write(run: Path, tokens: Any) -> None:
    record: Any = SimpleNamespace(to_json=lambda: {"numerics": {}})
    write_record(run, record, tokens, SimpleNamespace(device=torch.device("cpu"), world_size=1), None)  # type: ignore[arg-type]


def test_run_record_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = "curl -H 'Authorization: Bearer hunter2' https://host/done"
    monkeypatch.setattr(sys, "argv", ["train.py", "runs/x", "--then", then, "--init-from", "https://me:hunter2@host"])
    monkeypatch.setattr("training.checkpoints.run_record.environment", lambda *_: {})
    tokens: Any = SimpleNamespace(directories=[SimpleNamespace(path=tmp_path)], tokenizer=None)
    write(tmp_path, tokens)
    text = (tmp_path / RESOLVED).read_text()
    assert "runs/x" in text and "hunter2" not in text


def test_a_users_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.checkpoints.run_record.environment", lambda *_: {})
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / RANKS_FILE).write_text("the ranks of the tokens")
    tokenizer = SimpleNamespace(ranks_file=RANKS_FILE, as_json=dict)
    directory = SimpleNamespace(path=tmp_path / "tokens")
    tokens: Any = SimpleNamespace(directories=[directory], tokenizer=(tmp_path / "tokens", tokenizer))
    (run := tmp_path / "run").mkdir()
    for name, content in ((RESOLVED, "the record of a run"), (RANKS_FILE, "the tokenizer of the run's tokens")):
        (run / name).write_text("a user's file")
        with pytest.raises(
            BadInput, match=rf"{name}: is not {content}, so it was not overwritten \(13 bytes\); move it away"
        ):
            write(run, tokens)
        assert (run / name).read_text() == "a user's file"
        (run / name).unlink()
    write(run, tokens)
    (tmp_path / "tokens" / RANKS_FILE).write_text("other ranks, of tokens that were prepared again")
    write(run, tokens)  # an earlier job's copy is replaced
    assert (run / RANKS_FILE).read_text() == "other ranks, of tokens that were prepared again"


def recorded(run: Path, **changes: Any) -> RunRecord:
    """Write EARLIER with changes and read it again. Changes to `model` and `train` are merged with EARLIER's keys."""
    merged = {key: EARLIER[key] | changes.pop(key) for key in ("model", "train") if key in changes}
    (run / RESOLVED).write_text(json.dumps(EARLIER | merged | changes))
    record = read_record(run)
    assert record is not None
    return record


def test_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    record = recorded(tmp_path, train={"on_spike": "skip", "learning_rate": 1}, model={"drop_rate": 0})
    expected = TrainConfig.from_keys(EARLIER["train"] | {"learning_rate": 1.0})
    assert record.train == expected and record.model == ModelConfig(**EARLIER["model"])
    assert record.train.optimization.optimizer == "adamw" and record.model.activation == "gelu_tanh"  # not recorded
    record_json = record.to_json()
    assert record_json["train"] == expected.flat() | {"on_spike": "skip"}
    assert json.dumps(record_json["train"]["learning_rate"]) == "1.0" and record.network_config() == record.model
    assert pickle.loads(pickle.dumps(record)) == record  # because ranks send the record to each other


def test_recorded_value_that_is_now_invalid_is_kept(tmp_path: Path) -> None:
    record = recorded(tmp_path, train={"optimizer": "lion", "log_interval": 0, "cpu_threads": "all"})
    execution = record.train.execution
    assert (record.train.optimization.optimizer, record.train.log_interval, execution.cpu_threads) == ("lion", 0, "all")
    assert execution.precision == "auto" and record.to_json()["train"]["optimizer"] == "lion"
    with pytest.raises(BadInput, match=r'train\.json: optimizer: got "adamw", but step-1 was made with "lion"'):
        differences(tmp_path, record, recorded(tmp_path), Path("step-1"))


def test_network_of_another_version_is_refused(tmp_path: Path) -> None:
    record = recorded(tmp_path, model={"parallel_block": True})
    assert record.model == ModelConfig(**EARLIER["model"]) and record.to_json()["model"]["parallel_block"]
    with pytest.raises(ValueError, match="model: unknown key 'parallel_block', so another version of Lockstep trained"):
        record.network_config()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"train": []}, r"train: got \[\], wanted an object"),
        ({"train": {"dataset": "d"}}, "train: key 'microbatch_size' is missing"),
        ({"train": EARLIER["train"] | {"dataset": 3}}, "train: dataset: got 3, wanted a non-empty string"),
        ({"model": {}}, "model.vocab_size: missing"),
        ({"model": EARLIER["model"] | {"n_heads": True}}, "model.n_heads: got True, wanted an integer"),
    ],
)
def test_unreadable_settings_are_named(tmp_path: Path, wrong: dict[str, Any], problem: str) -> None:
    (tmp_path / RESOLVED).write_text(json.dumps(EARLIER | wrong))
    with pytest.raises(BadInput, match=rf"{RESOLVED}: damaged or edited: {problem}"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"global_batch_size": 0}, {"steps": -1}, {"world_size": 0}, {"accumulation": 1.5}, {"steps": True}]
)
def test_damaged_run_record_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert recorded(tmp_path)
    (tmp_path / RESOLVED).write_text(json.dumps(EARLIER | wrong))
    with pytest.raises(
        BadInput, match=rf"{RESOLVED}: damaged or edited: {next(iter(wrong))}: got .*; copy it here again"
    ):
        read_record(tmp_path)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_job_record_is_read_back(tmp_path: Path, names: list[str]) -> None:
    directories = [tmp_path / name for name in names]
    tokenizer = record_of(load_tokenizer("bytes"), ranks=False)
    write(
        tmp_path,
        SimpleNamespace(
            directories=[SimpleNamespace(path=path) for path in directories], tokenizer=(tmp_path, tokenizer)
        ),
    )
    job = read_job(tmp_path)
    job.check()
    assert (job.token_directories, job.tokenizer, job.price_per_hour) == (tuple(directories), tokenizer, None)
    machine = job.environment
    assert machine is not None and machine.device and machine.packages["torch"] and machine.world_size == 1
    assert machine.python == sys.version.split()[0]


def test_job_without_a_record_has_an_empty_record(tmp_path: Path) -> None:
    assert read_job(tmp_path) == JobRecord.from_json({}) == JobRecord()
    (tmp_path / RESOLVED).write_text("{")
    with pytest.raises(BadInput, match=RESOLVED):
        read_job(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("token_files", 5, "token_files: got 5, wanted an array"),
        ("token_files", None, "token_files: got None, wanted an array"),
        ("token_files", ["a", 5], r"token_files\[1\]: got 5, wanted a string"),
        ("tokenizer", "bytes", "tokenizer: got 'bytes', wanted an object"),
        ("tokenizer", {"name": "bytes"}, "tokenizer.vocabulary_size: missing"),
        ("environment", {"device": 5}, "environment.device: got 5, wanted a string"),
        ("price_per_hour", "2", "price_per_hour: got '2', wanted "),
        ("price_per_hour", -1, "price_per_hour: wanted dollars"),
        ("price_per_hour", 10**400, "price_per_hour: "),
    ],
)
def test_wrong_value_matters_only_if_checked(key: str, value: Any, problem: str) -> None:
    environment = {"device": "cpu", "threads": 2}
    sound = {"token_files": "a", "environment": environment, "price_per_hour": 2, "command": 5, "misfits": 5}
    expected = JobRecord(token_files=("a",), environment=JobEnvironment(device="cpu"), price_per_hour=2)
    assert JobRecord.from_json(sound) == expected
    job = JobRecord.from_json(sound | {key: value})
    for name in ("token_files", "tokenizer", "environment", "price_per_hour"):
        absent = JobRecord() if name == key else expected
        assert getattr(job, name) == getattr(absent, name)
        if name != key:
            job.check(name)
    for keys in ((key,), ()):
        with pytest.raises(InvalidValue, match=problem):
            job.check(*keys)
