"""Commands of evaluate.py on emulated GPUs, on one and two ranks, with a model that was trained on such GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import EXIT_DONE, EXIT_ERROR
from tests.conftest import ROOT, write_run
from tests.cuda.conftest import SMALL
from tests.cuda.emulated import disturbed, finished, train
from tests.evaluation.comparison.stored import results
from tests.evaluation.core.written_bundle import write_bundle
from tests.evaluation.instruct.instructions import RECORDS


@pytest.fixture(scope="module")
def trained(token_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate") / "run"
    write_run(directory, token_files, SMALL | {"context_length": 128}, compile=False, min_train_tokens=8 * 128)
    finished(train(directory))
    return directory


def evaluated(trained: Path, ranks: int, command: str, *options: object, statuses: Any = (EXIT_DONE,)) -> str:
    """Run a command of evaluate.py, check that it stored its result, and return its output."""
    done = disturbed("finite_noise", ROOT / "evaluate.py", command, trained, *options, ranks=ranks)
    assert done.returncode in statuses, done.stderr
    assert results(trained)[-1]["evaluation"] == command
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_held_out_loss_and_core(trained: Path, ranks: int, tmp_path: Path) -> None:
    assert "nats" in evaluated(trained, ranks, "loss", "--count", "1000")
    assert "gold answers" in evaluated(trained, ranks, "core", "--bundle", write_bundle(tmp_path / "bundle"))


def test_fine_tuning(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(json.dumps(RECORDS))
    options = ("--data", tmp_path / "records.json", "--epochs", "1", "--longest-answer", "4")
    assert evaluated(trained, 2, "instruct", *options)
    assert list((trained / "answers").iterdir())


def test_samples_are_generated(trained: Path) -> None:
    options = ("--prompt", "def ", "--tokens", "20")
    # Status 1 means that the output is degenerate, which can happen because the output is noise.
    assert "def " in evaluated(trained, 1, "smoke", *options, statuses=(EXIT_DONE, EXIT_ERROR))
