"""Account of an experiment: no second that was paid is forgotten."""

import json
import os
import time
from pathlib import Path

import pytest

from experiments.shared.account import ACCOUNT, BEAT_SECONDS, Account
from experiments.shared.pool_options import PoolOptions

NONE_BEFORE = {"seconds": 0.0, "usd": 0.0, "unpriced_seconds": 0.0}
PRICED = PoolOptions(price_per_hour=2.0, max_usd=10.0, max_hours=100.0)


def call_before(directory: Path, *, seconds_ago: float, beat: float, ended: bool, price: float | None = 1.0) -> None:
    """Write an earlier call; `beat`: its age at its last line."""
    began = {"began": time.time() - seconds_ago, "price_per_hour": price, "earlier": NONE_BEFORE, "seconds": 0.5}
    last = {"seconds": beat} | ({"ended": True} if ended else {})
    (directory / ACCOUNT).write_text(f"{json.dumps(began)}\n{json.dumps(last)}\n")


def earlier(directory: Path, *, jobs_live: bool = False) -> float:
    account = Account(directory, PRICED, jobs_live=jobs_live)
    account.close()
    return account.earlier.seconds


def test_a_call_that_ended_counts_to_its_end(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=5000, beat=1000, ended=True)
    assert earlier(tmp_path) == 1000
    assert 1000 <= earlier(tmp_path) < 1000 + 600  # the second call counts as well, with its process


def test_a_killed_call_counts_a_beat_more_than_it_has_written(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    assert earlier(tmp_path) == 1000 + BEAT_SECONDS


def test_jobs_that_went_on_after_a_kill_count_to_what_they_wrote_last(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.touch()
    os.utime(metrics, (time.time() - 40_000,) * 2)
    assert earlier(tmp_path) == pytest.approx(10_000 + BEAT_SECONDS, abs=5)


def test_jobs_that_still_train_count_until_now(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    now = earlier(tmp_path, jobs_live=True)
    assert 40_000 < now <= 50_001


def test_what_a_user_trains_after_a_call_has_ended_costs_the_experiment_nothing(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=True)
    assert earlier(tmp_path, jobs_live=True) == 1000


def test_the_devices_of_a_job_are_free_when_it_has_ended(tmp_path: Path) -> None:
    account = Account(tmp_path, PRICED, jobs_live=False)
    account.started("a", ["0"])
    account.started("b", ["1"])
    account.ended("a")
    account.close()
    assert Account(tmp_path, PRICED, jobs_live=False).devices == account.devices == {"b": ["1"]}


def test_each_call_counts_at_its_own_price_and_one_without_at_the_present_one(tmp_path: Path) -> None:
    for price, usd in ((1.0, 0.5), (None, 1.0)):
        call_before(tmp_path, seconds_ago=5000, beat=1800, ended=True, price=price)
        account = Account(tmp_path, PRICED, jobs_live=False)
        spent, left = account.usd(), account.seconds_left()
        assert spent is not None and left is not None
        assert spent == pytest.approx(usd + 2 * account.call_seconds() / 3600, abs=1e-3)
        assert left == pytest.approx((10 - spent) / 2 * 3600, abs=1)
        account.close()


def test_a_torn_line_costs_nothing_that_was_written_before(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=50_000, beat=1000, ended=False)
    with (tmp_path / ACCOUNT).open("a") as file:
        file.write('{"seco')
    assert earlier(tmp_path) == 1000 + BEAT_SECONDS
    assert earlier(tmp_path) > 1000
