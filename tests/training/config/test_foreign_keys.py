"""Keys of other programs: each leads to one of ours, or to the reason why there is none."""

from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import TINY_MODEL, TINY_TRAIN
from tests.training.config.test_train_config import run_directory
from training.config.foreign_keys import FOREIGN_KEYS
from training.config.train_config import KEYS, load_run


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_every_key_of_another_program_leads_to_one_of_ours(tmp_path: Path, key: str) -> None:
    assert not any(key in known for known in KEYS.values())
    ours = FOREIGN_KEYS[key].partition(": ")[0]
    if ours:
        section, _, name = ours.partition(".")
        assert name in KEYS[section]
    files = {"model": TINY_MODEL, "train": {"dataset": "x"} | TINY_TRAIN}
    for number, changed in enumerate(({}, {"model": {key: 1}}, {"train": {key: 1}})):
        model, train = (files[name] | changed.get(name, {}) for name in files)
        directory = run_directory(tmp_path / str(number), model, train)
        with pytest.raises(BadInput, match=f"unknown key '{key}'; ") as raised:
            load_run(directory, [] if changed else [f"{key}=1"])
        assert (ours or "there is no such key").rpartition(".")[2] in str(raised.value)
