"""Account of an experiment: no second that was paid is forgotten."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.shared.account import ACCOUNT, CALL_SECONDS, Account
from experiments.shared.pool_options import PoolOptions
from experiments.shared.training_process import JOB_VARIABLE, PoolJob
from training.launch import job_seconds
from training.telemetry.budget import Budget

PRICED = PoolOptions(price_per_hour=2.0, budget=Budget(max_usd=10.0, max_hours=100.0))


def call_before(directory: Path, *, seconds_ago: float, beat: float, ended: bool, price: float | None = 1.0) -> None:
    """Write an earlier call with a job of `run`; `beat`: its age at its last line."""
    began = time.time() - seconds_ago
    job = {"devices": ["0"], "began": began + 5, "token": "abc"}
    lines = [
        {"seconds": 0.5, "call": {"began": began, "price_per_hour": price, "earlier": {}}},
        {"seconds": 5, "run": "run", "job": job},
        {"seconds": beat} | ({"ended": True} if ended else {}),
    ]
    (directory / ACCOUNT).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def earlier(directory: Path) -> float:
    return Account(directory, PRICED).earlier.seconds


def run_before(directory: Path, *starts_ago: float) -> Path:
    """Write the metrics of `run`, and return them: a job for each start, of 8,000 s of training."""
    (directory / "run").mkdir()
    lines = []
    for index, ago in enumerate(starts_ago):
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))
        lines += [
            {"event": "start", "step": index, "time": began},
            {"step": index + 1, "train_loss": 4.0, "elapsed_seconds": 8000.0 * (index + 1)},
        ]
    metrics = directory / "run" / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return metrics


def test_a_call_that_ended_counts_to_its_end(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=5000, beat=1000, ended=True)
    assert earlier(tmp_path) == 1000
    account = Account(tmp_path, PRICED)
    account.started("other", ["0"])
    account.close()
    assert 1000 < earlier(tmp_path) <= 1000 + job_seconds()  # the second call counts as well, with its process


def test_a_call_without_jobs_costs_nothing(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=5000, beat=1000, ended=True)
    before = (tmp_path / ACCOUNT).read_bytes()
    Account(tmp_path, PRICED).close()
    assert (tmp_path / ACCOUNT).read_bytes() == before


def test_a_killed_call_counts_a_beat_more_than_it_has_written(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    assert earlier(tmp_path) == 1000 + CALL_SECONDS


def test_jobs_that_went_on_after_a_kill_count_to_what_they_wrote_last(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    run_before(tmp_path, 49_990)
    assert earlier(tmp_path) == pytest.approx(10 + 8000 + CALL_SECONDS, abs=2)


def test_neither_a_touched_file_nor_a_later_job_by_hand_costs_the_experiment_anything(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    run_before(tmp_path, 49_990, 10_000).touch()
    assert earlier(tmp_path) == pytest.approx(10 + 8000 + CALL_SECONDS, abs=2)


def test_a_run_that_only_the_user_has_trained_costs_the_experiment_nothing(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    run_before(tmp_path, 10_000)
    assert earlier(tmp_path) == 1000 + CALL_SECONDS


def test_a_job_counts_no_longer_than_its_own_limit(tmp_path: Path) -> None:
    run_before(tmp_path, 49_990)
    job = PoolJob(devices=["0"], began=time.time() - 49_995, seconds=3000)
    assert job.last_written(tmp_path / "run") == job.began + 3000


def test_jobs_that_still_train_count_until_now_unless_another_job_has_taken_their_place(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    (tmp_path / "run").mkdir()
    train = "import fcntl, time; file = open('.lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(1); time.sleep(99)"
    for token, least, most in (("abc", 45_000, 50_001), ("", 1000, 1000 + CALL_SECONDS)):
        process = subprocess.Popen(
            [sys.executable, "-uc", train, "train.py", tmp_path / "run"],
            cwd=tmp_path / "run",
            env={**os.environ, JOB_VARIABLE: token},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline()
        assert least <= earlier(tmp_path) <= most
        process.kill()
        process.communicate()


def test_what_a_user_trains_after_a_call_has_ended_costs_the_experiment_nothing(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=True)
    run_before(tmp_path, 20_000)
    assert earlier(tmp_path) == 1000


def test_the_devices_of_a_job_are_free_when_it_has_ended(tmp_path: Path) -> None:
    account = Account(tmp_path, PRICED)
    account.started("a", ["0"])
    job = account.started("b", ["1"], 3000.0)
    account.ended("a")
    account.close()
    assert Account(tmp_path, PRICED).jobs == account.jobs == {"b": job}


@pytest.mark.parametrize(
    "line",
    [
        '{"run": "a"}',
        '{"seconds": "5"}',
        '{"seconds": 1e308}',
        '{"seconds": -5}',
        '{"seconds": 5, "run": "a/../b"}',
        '{"seconds": 5, "call": {"began": 1}}',
        '{"seconds": 5, "run": "a", "job": {"began": 5, "devices": [0]}}',
        '{"seconds": 5, "call": {"began": 1, "price_per_hour": 1, "earlier": {"usd": null}}}',
        '{"seconds": 5, "call": {"began": 1, "price_per_hour": NaN, "earlier": {}}}',
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    call_before(tmp_path, seconds_ago=5000, beat=1000, ended=True)
    with (tmp_path / ACCOUNT).open("a") as file:
        file.write(f"{{torn\n{line}\n")
    assert earlier(tmp_path) == 1000
    note = f"NOTE: {tmp_path / ACCOUNT}: left out as damaged: 2 lines, from line 4 on\n"
    assert capsys.readouterr().err == note


def test_a_call_whose_start_was_damaged_is_counted(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=5000, beat=1000, ended=True, price=2.0)
    with (tmp_path / ACCOUNT).open("a") as file:
        file.write('{"seconds": 0.5, "call": {"began\n{"seconds": 300}\n{"seconds": 600, "ended": true}\n')
    spent = Account(tmp_path, PRICED).earlier
    assert (spent.seconds, spent.usd) == (1600, pytest.approx(2 * 1600 / 3600))


def test_each_call_counts_at_its_own_price_and_one_without_at_the_present_one(tmp_path: Path) -> None:
    for price, usd in ((1.0, 0.5), (None, 1.0)):
        call_before(tmp_path, seconds_ago=5000, beat=1800, ended=True, price=price)
        account = Account(tmp_path, PRICED)
        spent, left = account.usd(), account.seconds_left()
        assert spent is not None and left is not None
        assert spent == pytest.approx(usd + 2 * account.call_seconds() / 3600, abs=1e-3)
        assert left == pytest.approx((10 - spent) / 2 * 3600, abs=1)
        account.close()


def test_a_torn_line_costs_nothing_that_was_written_before(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    with (tmp_path / ACCOUNT).open("a") as file:
        file.write('{"seco')
    account = Account(tmp_path, PRICED)
    account.started("run", ["0"])
    assert earlier(tmp_path) > account.earlier.seconds == 1000 + CALL_SECONDS
