"""Comparison of runs by their records: only differences in the measured tokens are errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from experiments.shared.run_comparison import MEASURE_KEYS, RecordedRun, check_same_measure, check_same_tokens

STREAM = {"directory": "tokens", "tokens": 1000, "files": ["a"], "sha256": ["1" * 64], "plan": "3" * 64}
RECORD: dict[str, Any] = {
    "model": {"vocab_size": 257, "context_length": 32, "emb_dim": 32},
    "train": {
        **{"dataset": "tokens", "objective": "text", "validation_sequences": 10, "start_val_token": 0},
        **{"validation_interval": 4, "learning_rate": 0.01},
    },
    "sources": [{"dataset": "tokens", "tokens": 500, "epochs": 0.5}],
    "train_stream": STREAM,
    "validation_stream": STREAM,
    "tokenizer": {"name": "bytes", "fingerprint": "4" * 64},
    "numerics": {"precision": "fp32", "torch": "2.13.0"},
}


def recorded(folder: Path, record: Any) -> RecordedRun:
    folder.mkdir(exist_ok=True)
    (folder / "resolved.json").write_text(json.dumps(record))
    return RecordedRun.read(folder)


@pytest.mark.parametrize("name", MEASURE_KEYS)
def test_verdicts_compare_what_the_runs_recorded(tmp_path: Path, name: str) -> None:
    base, (section, _, key) = recorded(tmp_path / "base", RECORD), name.partition(".")
    for changed in ("other", None):
        values = RECORD[section] | {key: changed}
        with pytest.raises(
            BadInput, match=rf"candidate/resolved.json: {name}: {changed!r}, but base has .*: the losses"
        ):
            check_same_measure([base, recorded(tmp_path / "candidate", RECORD | {section: values})])
    without = {setting: value for setting, value in RECORD[section].items() if setting != key}
    with pytest.raises(BadInput, match=f"{name}: 'absent', but base has"):
        check_same_measure([base, recorded(tmp_path / "candidate", RECORD | {section: without})])


def test_levers_and_folders_may_differ(tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", RECORD)
    moved = STREAM | {"directory": "elsewhere"}
    changed = RECORD | {"validation_stream": moved, "train": RECORD["train"] | {"learning_rate": 1.0}}
    runs = [base, recorded(tmp_path / "candidate", changed)]
    check_same_measure(runs)
    check_same_tokens(runs)
    assert [run.train_tokens for run in runs] == [500, 500]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_folder_that_was_prepared_again_is_named(tmp_path: Path, split: str) -> None:
    base = recorded(tmp_path / "base", RECORD)
    for changed in (STREAM | {"sha256": ["2" * 64]}, [STREAM, STREAM | {"tokens": 999}]):
        candidate = recorded(tmp_path / "candidate", RECORD | {f"{split}_stream": changed})
        with pytest.raises(BadInput, match=rf"tokens: {split} tokens: '\S+ tokens, sha256 \d+', but base has"):
            check_same_tokens([base, candidate])
    growing = {"directory": "tokens", "tokens": None, "sha256": [], "plan": "3" * 64}
    check_same_tokens([recorded(tmp_path / name, RECORD | {f"{split}_stream": growing}) for name in ("a", "b")])


@pytest.mark.parametrize("record", [{}, {"model": 1, "train": [], "sources": "x", "train_stream": 3, "numerics": None}])
def test_invalid_record_values_count_as_missing(tmp_path: Path, record: dict[str, Any]) -> None:
    run = recorded(tmp_path / "odd", record)
    assert "absent" in run.measure.values() and run.train_tokens is None
    with pytest.raises(BadInput, match="'absent', but base has"):
        check_same_measure([recorded(tmp_path / "base", RECORD), run])
    with pytest.raises(BadInput, match="cannot be read"):
        RecordedRun.read(tmp_path)


@pytest.mark.parametrize("structure", ["{}", "x", "[]", '{"added_tokens": [1]}'])
def test_a_damaged_tokenizer_structure_is_an_error(tmp_path: Path, structure: str) -> None:
    tokenizer = {**RECORD["tokenizer"], "structure": structure}
    with pytest.raises(
        BadInput, match=r"resolved\.json: tokenizer: structure: got .*, wanted the JSON text of an object"
    ):
        recorded(tmp_path / "run", RECORD | {"tokenizer": tokenizer})
