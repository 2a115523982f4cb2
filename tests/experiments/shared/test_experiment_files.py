"""The run directories of an experiment are written once, and must not change after they have results."""

from pathlib import Path

import pytest

from common.errors import BadInput
from common.json_files import read_json
from experiments.shared.experiment_files import missing_tokens, write_run_directory
from tests.conftest import MakeRun
from training.config.train_config import load_run


def test_only_runs_that_have_not_begun_are_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run_directory(run, {"model": {"n_layers": 2}, "train": {}})
    size = (run / "model.json").stat().st_size
    write_run_directory(run, {"model": {"n_layers": 3}, "train": {}})
    note = f"NOTE: {run / 'model.json'}: replaced ({size} bytes), because the experiment's settings have changed\n"
    assert capsys.readouterr().err == note
    assert read_json(run / "model.json") == {"n_layers": 3}
    (run / "metrics.jsonl").touch()
    write_run_directory(run, {"model": {"n_layers": 3}, "train": {}})
    changed = "train.json: this run was started with learning_rate absent, but the experiment now has 0.1"
    with pytest.raises(BadInput, match=changed):
        write_run_directory(run, {"model": {"n_layers": 3}, "train": {"learning_rate": 0.1}})


def test_a_missing_dataset_is_an_error_if_steps_need_it(make_run: MakeRun) -> None:
    file = Path("sweep.json")
    assert missing_tokens(file, load_run(make_run("here"), ()).train) is None
    line = missing_tokens(file, load_run(make_run("nowhere", dataset="/nope"), ()).train)
    assert line is not None and line.startswith("sweep.json: ") and "/nope is not a directory here" in line
    unknown = load_run(make_run("unknown", dataset="/nope", min_train_tokens=None), ()).train
    with pytest.raises(BadInput, match=r"/nope is not a directory here; .*or set min_train_tokens"):
        missing_tokens(file, unknown)
