"""Recording samples: each checkpoint of a real run is sampled and measured once, and problems do not end the report."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reporting.samples.sample_log as recording
from common.files import lock
from reporting.samples.sample_log import read_samples, record_samples
from tests.conftest import change_weights, complete, metrics
from tests.reporting.written_runs import start, write_resolved, write_run
from tests.tokens.preparing import jsonl, write
from tokens.format.token_file import open_split
from training.checkpoints.directory import WEIGHTS
from training.telemetry.metrics_log import SAMPLES


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / SAMPLES).read_text().splitlines()]


def test_each_checkpoint_is_recorded_once_newest_first(copied: Path, token_files: Path) -> None:
    assert record_samples(copied) == []
    assert [line["step"] for line in lines(copied)] == [8, 4]
    assert record_samples(copied) == []
    first, last = read_samples(copied)[0]
    assert (first.step, last.step, last.name, len(lines(copied))) == (4, 8, "step-00000008", 2)
    prompts = [answer.prompt for answer in last.said[::2]]
    assert [(answer.prompt, answer.temperature) for answer in last.said] == [
        (text, way) for text in prompts for way in (0, 1)
    ]
    assert len({*prompts}) == 6 and max(map(len, prompts)) <= 32
    text_bytes = bytes(
        number for number in open_split(token_files, "validation").read(0, 1 << 16).tolist() if number < 256
    )
    assert all(text.encode() in text_bytes for text in prompts)
    assert all(answer.text for answer in last.said) and first.said != last.said
    assert last.held_out is not None and last.log_probabilities is not None
    ids = open_split(token_files, "validation").read(0, recording.TEXT_TOKENS + 1)
    assert last.held_out.ids == ids.tolist()
    assert b"".join(token.encode("latin-1") for token in last.held_out.tokens) == bytes(ids[ids < 256].tolist())
    assert all(len(line) < 30_000 for line in (copied / SAMPLES).read_text().splitlines())


def test_log_probabilities_equal_the_runs_validation(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "TEXT_TOKENS", 10 * 32)  # validation_sequences x context
    record_samples(copied)
    for sample in read_samples(copied)[0]:
        assert sample.log_probabilities is not None
        mean = -np.mean([value for value in sample.log_probabilities if value is not None])
        assert mean == pytest.approx(metrics(copied, "validation_loss")[sample.step], abs=1e-3)


def test_samples_of_replaced_steps_are_hidden(copied: Path) -> None:
    record_samples(copied)
    before = read_samples(copied)[0]
    complete(copied, "--resume", "step-00000004", "--set", "learning_rate=0.02", "--max-steps", "6")
    assert [sample.step for sample in read_samples(copied)[0]] == [4]
    complete(copied, "--set", "learning_rate=0.02")
    assert [sample.step for sample in read_samples(copied)[0]] == [4]
    assert record_samples(copied) == []
    now = read_samples(copied)[0]
    assert [sample.step for sample in now] == [4, 6, 8] and now[0] == before[0]
    assert now[2].log_probabilities != before[1].log_probabilities
    shutil.rmtree(copied / "checkpoints")
    assert read_samples(copied)[0] == now
    complete(copied, "--resume", "never", "--max-steps", "2")
    assert not (copied / SAMPLES).exists() and read_samples(copied)[0] == []
    assert len(list(copied.glob(f"archive/*/{SAMPLES}"))) == 1


def test_weights_of_another_run_at_the_same_step_are_sampled_again(copied: Path) -> None:
    record_samples(copied)
    change_weights(copied / "checkpoints" / "step-00000008", lambda weights: weights["final_norm.weight"].mul_(1.5))
    assert [sample.step for sample in read_samples(copied)[0]] == [4]
    record_samples(copied)
    assert [sample.step for sample in read_samples(copied)[0]] == [4, 8] and len(lines(copied)) == 3


def test_deleted_checkpoints_are_skipped_damaged_ones_are_named(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = copied / "checkpoints" / "step-00000004" / WEIGHTS
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    weights_on_disk = recording.weights_on_disk

    def then_delete(directory: Path) -> dict[str, str]:
        digests = weights_on_disk(directory)
        shutil.rmtree(directory / "checkpoints" / "step-00000008", ignore_errors=True)
        return digests

    monkeypatch.setattr(recording, "weights_on_disk", then_delete)
    [note] = record_samples(copied)
    assert f"{damaged}: damaged" in note
    assert not read_samples(copied)[0]


def test_missing_tokens_give_a_note_instead_of_a_heat_map(copied: Path, tmp_path: Path) -> None:
    file = copied / "resolved.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"token_files": str(tmp_path / "absent")}))
    [note] = record_samples(copied)
    assert note.startswith("no held-out text, so there are no log-probabilities") and "absent" in note
    file.write_text(json.dumps(record | {"model": record["model"] | {"vocab_size": 8}}))
    [note] = record_samples(copied)
    assert "ids beyond the vocabulary of 8" in note  # tokens of another run
    assert [(sample.held_out, len(sample.said)) for sample in read_samples(copied)[0]] == [(None, 12)] * 2
    file.write_text(json.dumps(record))
    assert record_samples(copied) == []
    assert all(sample.held_out is not None for sample in read_samples(copied)[0]) and len(lines(copied)) == 4


def test_a_run_without_checkpoints_or_tokenizer_gets_a_note(copied: Path) -> None:
    record = json.loads((copied / "resolved.json").read_text())
    (copied / "resolved.json").write_text(json.dumps(record | {"tokenizer": None}))
    notes = record_samples(copied)
    assert notes and all("does not name the tokenizer" in note for note in notes)
    shutil.rmtree(copied / "checkpoints")
    [note] = record_samples(copied)
    assert "no checkpoint on this disk" in note


def test_a_diverged_model_is_recorded_once_with_its_problem(copied: Path) -> None:
    change_weights(
        copied / "checkpoints" / "step-00000008", lambda weights: weights["final_norm.bias"].fill_(torch.nan)
    )
    for _ in range(2):
        assert record_samples(copied) == []
    sample = read_samples(copied)[0][1]
    assert sample.problem is not None and "not finite" in sample.problem and len(lines(copied)) == 2
    assert sample.log_probabilities is not None and set(sample.log_probabilities) == {None}


def test_only_one_report_records_samples_at_a_time(copied: Path) -> None:
    with (copied / SAMPLES).open("w") as file:
        lock(file, copied / SAMPLES, "")
        [note] = record_samples(copied)
        assert "another report.py is recording samples" in note
    assert lines(copied) == []


def test_a_log_that_cannot_be_written_gets_a_note(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recording.JsonLog, "append", full)
    [note] = record_samples(copied)
    assert f"{copied / SAMPLES}: cannot be written: No space left on device; make room" in note


def test_changed_tokens_are_not_used_as_held_out_text(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 9)
    manifest = write(tmp_path / "out", source, validation_fraction=0.5)
    entry = manifest.files["validation.safetensors"]
    stream = {"directory": str(tmp_path / "out"), "tokens": entry.tokens, "sha256": [entry.sha256]}
    run = write_run(tmp_path / "run", [start()])
    write_resolved(run, token_files=str(tmp_path / "out"), validation_stream=stream)
    assert recording._held_out_tokens(run)[0] is not None
    shutil.rmtree(tmp_path / "out")
    write(tmp_path / "out", source, validation_fraction=0.3)
    text, [note] = recording._held_out_tokens(run)
    assert text is None and "out: the token files have changed since the run was validated on them" in note
