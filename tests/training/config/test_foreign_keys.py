"""Keys of other programs: the error about such a key names Lockstep's own key, or explains why there is none."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from common.other_programs import foreign_keys
from tests.conftest import write_run
from training.config.train_config import KEY_ROWS, KEYS, load_run

FOREIGN_KEYS = foreign_keys(KEY_ROWS)


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_other_programs_keys_are_explained(tmp_path: Path, key: str) -> None:
    assert not any(key in fields for fields in KEYS.values())
    ours = FOREIGN_KEYS[key].ours
    if ours:
        section, _, name = ours.partition(".")
        assert name in KEYS[section]
    for number, (model, train) in enumerate((({}, {}), ({key: 1}, {}), ({}, {key: 1}))):
        directory = write_run(tmp_path / str(number), Path("x"), model, **train)
        with pytest.raises(BadInput, match=f"unknown key '{key}'; ") as raised:
            load_run(directory, [] if number else [f"{key}=1"])
        assert (ours or "Lockstep has no such key").rpartition(".")[2] in str(raised.value)


@pytest.mark.parametrize("batches", [2.5, True, None, "3", 10**400])
def test_invalid_validation_batches_are_refused(tmp_path: Path, batches: object) -> None:
    directory = write_run(tmp_path / "r", Path("x"), validation_batches=batches)
    values = json.loads((directory / "train.json").read_text())
    del values["validation_sequences"]
    (directory / "train.json").write_text(json.dumps(values))
    with pytest.raises(BadInput, match=r"train\.json: validation_(batches|sequences): got .* wanted "):
        load_run(directory, [])
