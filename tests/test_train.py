"""train.py as a process: one-line errors and their exit statuses, and the dry run."""

import json
from importlib import import_module
from pathlib import Path

import attrs
import pytest

import train as script
from tests.conftest import ROOT, MakeRun, complete, one_line, train
from training.command import TrainCommand
from training.supervision.run_lock import read_exit

LONG_NAME = "n" * 5000


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, ["--set", "min_train_tokens=10000000"], "train.json: max_epochs: got 1, wanted at least"),
        (1, ["--set", "validation_sequences=100000"], "hold out more with --validation-fraction"),
        (1, ["--set", "model.vocab_size=256"], "got 256, wanted at least 257, the vocabulary of tokenizer bytes"),
        (1, ["--set", "model.emb_dim=262144"], "wanted 99.0 TB for 5 checkpoints"),
        (1, ["--set", "dataset=token_files/absent"], "is not a directory here; prepare it with prepare_data.py SOURCE"),
        (1, ["--set", f"dataset={LONG_NAME}"], "is not a directory here; prepare it with"),
        (1, ["--set", "dataset=a\x1b[2J"], "dataset: a\\x1b[2J is not a directory here"),
        (2, ["--token-files", "/absent"], "/absent: no train tokens"),
        (1, ["--token-files", LONG_NAME], ": File name too long"),
        (1, ["--device", "cuda"], "--device cuda: got 0 GPUs for"),
        (1, ["--resume", "step-1"], "no such checkpoint; existing ones: none"),
        (1, ["--resume", LONG_NAME], "no such checkpoint; existing ones: none"),
        (
            2,
            ["--set", "global_batch_size=6", "--set", "determinism=run"],
            "which world size 2 does not allow",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_1(make_run: MakeRun, ranks: int, options: list[str], message: str) -> None:
    run = make_run()
    assert message in one_line(train(run, *options, ranks=ranks))
    assert sorted(path.name for path in run.iterdir()) == [".lock", "exit.json", "model.json", "train.json"]
    ended = read_exit(run)
    assert ended is not None and ended.reason == "user-error" and message in str(ended.problem)


def test_all_input_problems_are_reported(make_run: MakeRun) -> None:
    run = make_run(min_train_tokens=10**7, validation_sequences=10**5, global_batch_size=2, model={"emb_dim": 1 << 18})
    done = train(run, "--set", "vocab_size=256", ranks=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    expected = ("too few for world size 2", "TB for 5 checkpoints", "vocab_size: got 256", "hold out more")
    for line, message in zip(lines, expected, strict=True):
        assert message in line
    assert json.loads((run / "exit.json").read_text())["status"] == 1


def test_keys_used_as_options_suggest_set(make_run: MakeRun) -> None:
    for words, message in (
        (["--seed", "3"], "--seed: unknown option; did you mean --set train.random_seed=3?"),
        (["--lr=1e-3"], "--lr: unknown option; did you mean --set train.learning_rate=1e-3?"),
        (["--n-layers", "4"], "--n-layers: unknown option; did you mean --set model.n_layers=4?"),
        (["--sed", "4"], "--sed: unknown option"),
    ):
        done = train(make_run(words[0].strip("-")), *words)
        assert done.returncode == 2 and message in done.stderr


def test_too_little_memory_is_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy, shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=1 << 60)\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    run = make_run()
    line = one_line(train(run, "--set", "model.emb_dim=262144", script=script))
    assert "rank 0: this machine's memory is too small for microbatch_size 2; try --set" in line
    ended = read_exit(run)
    assert ended is not None and ended.reason == "out-of-memory" and ended.problem == line.removeprefix("train.py: ")


def test_impossible_names_are_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    assert "no such run directory" in one_line(train(tmp_path / LONG_NAME))
    odd = tmp_path / "bad\udcff"
    make_run().rename(odd)
    assert "bad\\udcff: the name is not UTF-8, so checkpoints in this folder could not be read" in one_line(train(odd))


def test_control_characters_never_reach_the_terminal(make_run: MakeRun) -> None:
    for options in ((), ("--dry-run",), ("--plan",)):
        done = complete(make_run(f"a\x1b[2J\n{len(options)}{options[-1:]}", min_train_tokens=256), *options)
        assert "\x1b" not in done.stdout + done.stderr
        assert done.stdout


def test_a_dry_run_needs_no_tokens() -> None:
    done = complete(ROOT / "runs" / "8xa100", "--dry-run", "--world-size", "8")
    assert "124,439,808 parameters" in done.stdout
    assert "24,874 steps x 131,072 = 3,260,284,928 tokens" in done.stdout
    assert "micro-batch 16 x accumulation 1 x world size 8" in done.stdout


def test_each_mode_has_an_option_and_a_function() -> None:
    assert script.INSTEAD_OF_TRAINING.keys() <= attrs.fields_dict(TrainCommand).keys()
    for module, function in script.INSTEAD_OF_TRAINING.values():
        assert callable(getattr(import_module(module), function))
