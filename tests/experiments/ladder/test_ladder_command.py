"""experiment.py ladder as a process."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.conftest import ROOT
from tests.experiments.ladder.conftest import MakeLadder

SCRIPT = ROOT / "experiment.py"


def ladder(*arguments: object) -> Any:
    return launch.run(SCRIPT, "ladder", *map(str, arguments), "--device", "cpu")


def steps(directory: Path) -> int:
    """Return how many steps all runs have logged, repeated ones included."""
    return sum(path.read_text().count("train_loss") for path in directory.glob("*/metrics.jsonl"))


def wait_until(condition: Callable[[], bool], process: launch.Process) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_five_times_a_ladder_has_the_results_of_an_undisturbed_one(make_ladder: MakeLadder) -> None:
    file = make_ladder()
    undisturbed, disturbed = file.with_name("undisturbed"), file.with_name("disturbed")
    first = ladder(file, "--output", undisturbed)
    assert "held out: predicted" in first.stdout, first.stdout + first.stderr
    for number, moment in enumerate((0, 5, 40, 90, 140)):
        process = launch.start(SCRIPT, "ladder", str(file), "--output", str(disturbed), "--device", "cpu")
        wait_until(lambda moment=moment: steps(disturbed) >= moment, process)  # type: ignore[misc]
        for pid in [process.pid, *(process.children() if number % 2 else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
    done = ladder(file, "--output", disturbed)
    assert done.returncode == first.returncode
    for name in ("ladder.md", "ladder.json"):
        assert (disturbed / name).read_bytes() == (undisturbed / name).read_bytes()
    trained = steps(disturbed)
    for checkpoints in disturbed.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)  # to free the disk: the metrics hold the results
    again = ladder(file, "--output", disturbed)
    assert again.stdout == done.stdout and steps(disturbed) == trained


def test_a_dry_run_names_runs_tokens_and_share_and_writes_nothing(make_ladder: MakeLadder) -> None:
    file = make_ladder()
    done = ladder(file, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "1x8-rate-0.005: N 2,824," in done.stdout and "x the target's" in done.stdout
    assert not file.with_suffix("").exists()


@pytest.mark.slow
def test_a_best_rate_at_the_edge_ends_an_older_forecast(make_ladder: MakeLadder, make_run: Callable[..., Path]) -> None:
    target = make_run("target", validation_interval=100, learning_rate=0.01)
    (target / "forecast.json").write_text('{"recipe": {}}')
    refused = ladder(make_ladder(target=target, rates=[1e-9, 2e-9, 4e-9]), "--max-hours", "0.2")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "no forecast: the best one of" in refused.stderr
    assert not (target / "forecast.json").exists()
