"""A run that starts while its tokens are being prepared has the same batches as a run that starts afterwards."""

import signal
import time
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import ROOT, MakeRun, complete, metrics, one_line, train
from tests.tokens.preparing import CRASH, PREPARE, jsonl
from tests.tokens.preparing import run as command
from tests.training.supervision.runs import assert_same_weights

STEPS = 30
SETTINGS = {  # a step reads 8 x 32 tokens
    "min_train_tokens": STEPS * 8 * 32,
    "shuffle": True,
    "era_tokens": 1000,
    "validation_sequences": 8,
    "checkpoint_interval": 1000,
}


@pytest.fixture
def preparation(tmp_path: Path) -> tuple[object, ...]:
    """Options of prepare_data.py for 60 units, each with about 240 train tokens."""
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}: {number**3}" for number in range(600)])
    fixed = ("--tokenizer", "bytes", "--executor", "inline", "--unit-bytes", "400", "--validation-fraction", "0.1")
    return (source, "--output", tmp_path / "tokens", *fixed)


def prepare_units(preparation: tuple[object, ...], units: int) -> None:
    """Prepare `units` more units, and then kill the preparation."""
    killed = command(CRASH, *preparation, CRASH_AT="ledger written", CRASH_TIME=str(units))
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def follow(run: Path, ranks: int) -> launch.Process:
    return launch.start(ROOT / "train.py", str(run), "--device", "cpu", "--follow", "--hash-every", "1", ranks=ranks)


def wait_for(text: str, process: launch.Process) -> None:
    """Read a run's output until a line contains this text."""
    for line in process.stderr if text.startswith("waiting for tokens") else process.stdout:
        if text in line:
            return
    raise AssertionError(process.communicate())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shards"), [(1, ()), (2, ("--shard-tokens", "1500"))])
def test_following_gives_the_state_of_finished_tokens(
    make_run: MakeRun, tmp_path: Path, preparation: tuple[object, ...], ranks: int, shards: tuple[str, ...]
) -> None:
    preparation += shards
    settings = SETTINGS | {"dataset": str(tmp_path / "tokens")}
    early, late = make_run("early", **settings), make_run("late", **settings)
    prepare_units(preparation, 4)
    process = follow(early, ranks)
    wait_for("validation tokens; ", process)
    prepare_units(preparation, 20)
    wait_for("waiting for tokens", process)
    trained_steps = len(metrics(early, "train_loss"))
    assert 0 < trained_steps < STEPS
    time.sleep(2)  # the run waits; it prints nothing, and does not fail
    assert process.poll() is None and len(metrics(early, "train_loss")) == trained_steps
    assert command(PREPARE, *preparation).returncode == 0
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    complete(late, "--hash-every", "1")
    for key in ("state_sha256", "train_loss", "validation_loss"):
        assert metrics(early, key) == metrics(late, key), key
    assert len(metrics(late, "state_sha256")) == STEPS


@pytest.mark.slow
def test_waiting_runs_stop_and_continue(make_run: MakeRun, tmp_path: Path, preparation: tuple[object, ...]) -> None:
    settings = SETTINGS | {"dataset": str(tmp_path / "tokens"), "validation_interval": None}
    early, late = make_run("early", **settings), make_run("late", **settings)
    prepare_units(preparation, 20)
    process = follow(early, 2)
    wait_for("waiting for tokens", process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert "stopped early; run the same command again to continue" in output, errors
    assert command(PREPARE, *preparation).returncode == 0
    for run in (early, late):  # now without --follow
        complete(run)
    assert metrics(early, "train_loss") == metrics(late, "train_loss")
    assert_same_weights(early, late)


def test_tokens_prepared_differently_are_not_followed(
    make_run: MakeRun, tmp_path: Path, preparation: tuple[object, ...]
) -> None:
    run = make_run(**SETTINGS | {"dataset": str(tmp_path / "tokens"), "validation_interval": None})
    prepare_units(preparation, 20)
    complete(run, "--follow", "--max-steps", "2")
    source, _, _, *fixed_options = preparation
    assert command(PREPARE, source, "--output", tmp_path / "other", *fixed_options, "--split-seed", "1").returncode == 0
    line = one_line(train(run, "--token-files", str(tmp_path / "other")))
    assert f"{tmp_path / 'other'}: these train tokens were prepared differently from the tokens of" in line


@pytest.mark.slow
def test_tokens_that_cannot_be_followed_are_refused(
    make_run: MakeRun, tmp_path: Path, preparation: tuple[object, ...]
) -> None:
    settings = SETTINGS | {"dataset": str(tmp_path / "tokens"), "validation_interval": None}
    run = make_run(**settings)
    prepare_units(preparation, 5)
    for options, message in (
        ((), "still being prepared; wait until it is finished, or pass --follow"),
        (("--follow", "--set", "era_tokens=null"), "era_tokens: got null, wanted a number, such as 100000000: "),
        (("--follow", "--set", "min_train_tokens=null"), "min_train_tokens is null (all tokens)"),
    ):
        assert message in one_line(train(run, *options, ranks=2))
    process = follow(make_run("long", **settings | {"min_train_tokens": 100_000}), 1)
    wait_for("waiting for tokens", process)
    assert command(PREPARE, *preparation).returncode == 0
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "but the run with max_epochs 1 needs more; lower min_train_tokens, or raise max_epochs" in errors
