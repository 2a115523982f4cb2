"""`train.py --like`: the new run directory suits its tokens, is written once, and is never overwritten."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from model.config import GPT2_SMALL, ModelConfig
from tests.conftest import TINY_MODEL, MakeRun, one_line, train
from training.command import Options, TrainCommand
from training.config.train_config import Run
from training.planning.new_run import new_run


def like(
    template: Path | str, directory: Path, *overrides: str, network: ModelConfig = GPT2_SMALL, **command: Any
) -> Run:
    return new_run(TrainCommand(directory, like=str(template), overrides=overrides, **command), lambda _: network)


def tokens(directory: Path, train_tokens: int, validation_tokens: int = 0, largest: int = 64) -> Path:
    """Write token files without a manifest."""
    directory.mkdir()
    for name, count in (("train", train_tokens), ("validation", validation_tokens)):
        if count:
            ids = (np.arange(count) % (largest + 1)).astype(np.uint16)
            save_file({"tokens": ids}, directory / f"{name}.safetensors")
    return directory


def test_new_run_copies_the_recipe_and_fits_the_tokens(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = make_run(checkpoints="s3://bucket/prefix", min_train_tokens=100_000, max_epochs=2)
    few = tokens(tmp_path / "few", 32 * 32 * 10 + 1, 100)
    run = like(template, tmp_path / "new", f"dataset={few}", "learning_rate=0.5", "n_layers=1")
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/new: written, based on {template}",
        "model.json: vocab_size 257 -> 65: the largest id is 64; the tokenizer is unknown",
        "train.json: validation_sequences 10 -> 1: half of 96 held-out tokens",
        "train.json: max_epochs 2 -> 10: 100,096 tokens take 10 epochs",
    ]
    values = {name: json.loads((tmp_path / "new" / f"{name}.json").read_text()) for name in ("model", "train")}
    assert values["model"] == TINY_MODEL | {"vocab_size": 65, "n_layers": 1}
    source = json.loads((template / "train.json").read_text())
    del source["checkpoints"]
    fitted = {"dataset": str(few), "learning_rate": 0.5, "max_epochs": 10, "validation_sequences": 1}
    assert values["train"] == source | fitted
    assert run.train.file == tmp_path / "new" / "train.json" and run.model.n_layers == 1


def test_too_few_tokens_train_for_sixteen_epochs(make_run: MakeRun, tmp_path: Path) -> None:
    few = tokens(tmp_path / "few", 500)
    run = like(make_run(min_train_tokens=10_000_000), tmp_path / "new", f"dataset={few}")
    data = run.train.data
    assert (data.min_train_tokens, data.max_epochs) == (30 * 8 * 32, 16)  # 15 windows x 16 epochs = 30 steps of 8
    assert run.train.validation.validation_interval is None
    chosen = like(make_run("b"), tmp_path / "chosen", f"dataset={few}", "max_epochs=2", "min_train_tokens=null")
    assert chosen.train.data.max_epochs == 2 and chosen.train.data.min_train_tokens is None
    with pytest.raises(BadInput, match=r"which has fewer than context_length \+ 1 tokens"):
        like(make_run("c"), tmp_path / "none", f"dataset={tokens(tmp_path / 'fewer', 30)}")
    assert not (tmp_path / "none").exists()


def test_run_directory_is_written_once_and_never_overwritten(make_run: MakeRun, tmp_path: Path) -> None:
    template, new = make_run(), tmp_path / "new"
    assert like(template, new, dry_run=True).directory == new and not new.exists()
    with ThreadPoolExecutor() as pool:  # several commands at the same time
        runs = list(pool.map(lambda rate: _outcome(template, new, f"learning_rate={rate}"), (0.1, 0.2) * 4))
    [rate] = {run.train.optimization.learning_rate for run in runs if isinstance(run, Run)}
    [problem] = {str(run) for run in runs if isinstance(run, BadInput)}
    assert f"train.json: already exists, and its learning_rate is {rate}, but --like {template} would write " in problem
    (new / "train.json").unlink()  # as if the command had been killed between writing the two files
    assert isinstance(_outcome(template, new), Run)
    assert sorted(path.name for path in new.iterdir()) == ["model.json", "train.json"]
    assert isinstance(_outcome(new, new), Run)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="a file has the name of a folder"):
        like(template, tmp_path / "file")
    with pytest.raises(BadInput, match="--like absent: no such folder; wanted a run directory"):
        like("absent", tmp_path / "x")


def _outcome(template: Path, new: Path, *overrides: str) -> Run | BadInput:
    try:
        return like(template, new, *overrides)
    except BadInput as error:
        return error


def test_missing_tokens_are_noted_and_listed_tokens_used(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(token_files=tokens(tmp_path / "here", 3000))
    assert like(make_run(), tmp_path / "a", options=options).train.data.dataset == str(tmp_path / "here")
    remote = like(make_run("other"), tmp_path / "b", "dataset=OWNER/NAME")
    assert remote.train.data.dataset == "OWNER/NAME" and remote.model.vocab_size == 257
    assert "some of the run's tokens are not on this disk, so vocabulary, validation and" in capsys.readouterr().err
    two = [tmp_path / "here", tokens(tmp_path / "more", 3000, 100, largest=99)]
    parts = json.dumps([{"dataset": str(path), "weight": 1} for path in two])
    both = like(make_run("third", min_train_tokens=1024), tmp_path / "c", f"dataset={parts}")
    assert (both.model.vocab_size, both.train.validation.validation_sequences) == (100, 1)


def test_wrong_keys_and_missing_tokens_are_reported_together(make_run: MakeRun, tmp_path: Path) -> None:
    words = ("--set", "dataset=token_files/absent", "--set", "max_epochs=0")
    for command in ((make_run(),), (tmp_path / "new", "--like", str(make_run("other")))):
        [keys, dataset] = train(*command, *words).stderr.splitlines()
        assert "--set: max_epochs: got 0" in keys and "dataset: token_files/absent is not a directory" in dataset


def test_network_of_a_model_is_not_changed(tmp_path: Path) -> None:
    few = tokens(tmp_path / "few", 300_000, 3000)
    run = like("hf:any", tmp_path / "new", f"dataset={few}")
    assert run.model == GPT2_SMALL and run.train.batch.global_batch_size == 128
    with pytest.raises(BadInput, match=r"/model\.json: already exists, and its n_layers is 12, but --like .* write 1;"):
        like("hf:any", tmp_path / "new", f"dataset={few}", "n_layers=1")


def test_same_command_line_writes_then_resumes(make_run: MakeRun, tmp_path: Path) -> None:
    words = (tmp_path / "new", "--like", str(make_run()), "--set", "min_train_tokens=1024")
    first = train(*words, "--max-steps", "1", ranks=2)
    assert first.returncode == 0 and first.stdout.count("written, based on") == 1, first.stderr
    second = train(*words, ranks=2)
    assert second.returncode == 0 and "resum" in second.stdout and "written" not in second.stdout, second.stderr
    problem = one_line(train(*words, "--set", "learning_rate=3", ranks=2))
    assert "its learning_rate is 0.01, but --like " in problem and "would write 3;" in problem
