"""train.py: errors of one line and their statuses, and the dry run, through the real command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, train


def one_line(done: Any) -> str:
    """Return the one line that a refused run says, as train.py's own."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1, done.stderr
    assert 'train.py", line' not in done.stderr  # no traceback of ours; torchrun adds its own
    return lines[0]


LONG_NAME = "n" * 5000


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, ["--set", "min_train_tokens=10000000"], "train.json: max_epochs: got 1, wanted at least"),
        (1, ["--set", "validation_sequences=100000"], "hold out more with --validation-fraction"),
        (
            1,
            ["--set", "model.vocab_size=256"],
            "vocab_size: got 256, wanted at least 257, the vocabulary of tokenizer bytes",
        ),
        (1, ["--set", "dataset=token_files/absent"], "is no directory here; prepare it with prepare_data.py SOURCE"),
        (2, ["--token-files", "/absent"], "/absent: no train.safetensors"),
        (1, ["--device", "cuda"], "--device cuda: got 0 GPUs for"),
        (1, ["--resume", "step-1"], "no such checkpoint; there are none"),
    ],
)
def test_wrong_input_is_one_line_and_status_1(
    make_run: Callable[..., Path], ranks: int, options: list[str], message: str
) -> None:
    run = make_run()
    assert message in one_line(train(run, *options, ranks=ranks))
    assert sorted(path.name for path in run.iterdir()) == [".lock", "exit.json", "model.json", "train.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--token-files", LONG_NAME], ": File name too long"),
        (["--resume", LONG_NAME], "no such checkpoint; there are none"),
        (["--set", f"dataset={LONG_NAME}"], "is no directory here; prepare it with"),
        (["--set", "dataset=a\x1b[2J"], "dataset: a\\x1b[2J is no directory here"),
        (["--set", "model.emb_dim=262144"], "wanted 98961."),  # GB of checkpoints
    ],
)
def test_what_the_system_refuses_is_one_line(make_run: Callable[..., Path], options: list[str], message: str) -> None:
    assert message in one_line(train(make_run(), *options))


def test_memory_that_does_not_suffice_is_one_line(make_run: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy, shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=1 << 60)\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    line = one_line(train(make_run(), "--set", "model.emb_dim=262144", script=script))
    assert "rank 0: this machine's memory does not hold microbatch_size 2; try --set" in line


def test_names_that_cannot_be_are_one_line(make_run: Callable[..., Path], tmp_path: Path) -> None:
    assert "no such run directory" in one_line(train(tmp_path / LONG_NAME))
    odd = tmp_path / "bad\udcff"
    make_run().rename(odd)
    assert "bad\\udcff: not a UTF-8 name, so its checkpoints could not be read" in one_line(train(odd))


def test_control_characters_of_a_name_never_reach_the_terminal(make_run: Callable[..., Path]) -> None:
    for options in ((), ("--dry-run",), ("--plan",)):
        done = train(make_run(f"a\x1b[2J\n{len(options)}{options[-1:]}", min_train_tokens=256), *options)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert done.stdout


def test_an_impossible_world_size_is_said_once_before_any_process_group(make_run: Callable[..., Path]) -> None:
    line = one_line(train(make_run(global_batch_size=6), "--set", "determinism=run", ranks=2))
    assert "which world size 2 does not divide, as determinism run wants" in line


def test_a_dry_run_needs_no_tokens() -> None:
    done = train(ROOT / "runs" / "8xa100", "--dry-run", "--world-size", "8")
    assert done.returncode == 0, done.stderr
    assert "124,439,808 parameters" in done.stdout
    assert "24,874 steps x 131,072 = 3,260,284,928 tokens" in done.stdout
    assert "micro-batch 16 x accumulation 1 x world size 8" in done.stdout
    wrong = train(ROOT / "runs" / "8xa100", "--world-size", "8")
    assert wrong.returncode == 2


def test_all_tokens_are_used_where_no_number_is_given(make_run: Callable[..., Path], token_files: Path) -> None:
    run = make_run(min_train_tokens=None)
    planned = train(run, "--dry-run", "--world-size", "2")
    manifest = json.loads((token_files / "manifest.json").read_text())
    available = manifest["files"]["train.safetensors"]["tokens"]
    assert f"run          {(available - 1) // 32 // 8:,} steps x 256" in planned.stdout
