"""Locations of token files: local directories come first, and then datasets on the hub."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from common.hub_client import note_local
from tests.conftest import MakeRun
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.data.locate_tokens import DOWNLOADS, lengths_at_hand, lengths_of, locate_tokens, streams_at_hand


def test_local_directories_are_preferred_to_the_hub(make_run: MakeRun, token_files: Path) -> None:
    [local] = locate_tokens(load_run(make_run(), []).train, None)
    assert (local.directory, local.remote) == (token_files, False)
    [hub] = locate_tokens(load_run(make_run("hub", dataset="someone/dataset"), []).train, None)
    assert (hub.directory, hub.remote) == (DOWNLOADS / "someone/dataset", True)


def test_folders_that_hide_a_dataset_are_noted(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note_local.cache_clear()
    monkeypatch.chdir(tmp_path)
    Path("someone/dataset").mkdir(parents=True)
    [local] = locate_tokens(load_run(make_run("hub", dataset="someone/dataset"), []).train, None)
    assert (local.directory, local.remote) == (Path("someone/dataset"), False)
    assert "for a dataset on the hub, write hf:someone/dataset" in capsys.readouterr().err
    for name in ("manifest.json", "plan.json"):  # either file shows that prepare_data.py made the folder
        note_local.cache_clear()
        file = Path("someone/dataset", name)
        file.touch()
        locate_tokens(load_run(make_run(name, dataset="someone/dataset"), []).train, None)
        assert capsys.readouterr().err == ""
        file.unlink()


@pytest.mark.parametrize("dataset", ["token_files/absent", "absent", "a/b/c"])
def test_missing_datasets_are_refused(make_run: MakeRun, dataset: str) -> None:
    with pytest.raises(BadInput, match=f"run/train.json: dataset: {dataset} is not a directory here; prepare it with"):
        locate_tokens(load_run(make_run(dataset=dataset), []).train, None)


def test_missing_datasets_have_unknown_lengths(make_run: MakeRun, tmp_path: Path) -> None:
    run = load_run(make_run(dataset="someone/dataset"), [])
    assert lengths_at_hand(run.train) == {"someone/dataset": None}
    save_file({"tokens": np.zeros(99, np.uint16)}, tmp_path / "train.safetensors")
    assert lengths_of(streams_at_hand(run.train, tmp_path)) == {str(tmp_path): 99}
    all_tokens = load_run(make_run("every", dataset="someone/dataset", min_train_tokens=None), [])
    with pytest.raises(BadInput, match="the number of steps is not known without all token files of someone/dataset"):
        make_plan(all_tokens.train, 32, 1, lengths_at_hand(all_tokens.train))
