"""The account of an experiment: all paid time is recorded."""

import json
import os
import time
from pathlib import Path

import pytest

from common.errors import BadInput
from common.launch import job_seconds
from experiments.shared.account import ORPHAN_SECONDS, Account
from experiments.shared.training_jobs import PoolOptions
from training.telemetry.budget import Budget
from training.telemetry.metrics_log import ACCOUNT

PRICED = PoolOptions(price_per_hour=2.0, budget=Budget(max_usd=10.0, max_hours=100.0))


def call_before(directory: Path, *, seconds_ago: float, ended: bool, price: float | None = 1.0) -> Path:
    """Write the account of an earlier call that took 1,000 seconds, and return the path of the account.

    The last line of the account was written `seconds_ago` seconds ago.
    """
    spent = {"seconds": 1000, "usd": (price or 0) * 1000 / 3600, "unpriced_seconds": 0 if price else 1000}
    last = {"time": time.time() - seconds_ago, "spent": spent, "price_per_hour": price, "ended": ended}
    first = last | {"spent": dict.fromkeys(spent, 0), "ended": False}
    (directory / ACCOUNT).write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    return directory / ACCOUNT


def earlier(directory: Path) -> float:
    return Account(directory, PRICED).earlier.seconds


def test_calls_are_charged_until_their_end(tmp_path: Path) -> None:
    path = call_before(tmp_path, seconds_ago=4000, ended=True)
    before = path.read_bytes()
    Account(tmp_path, PRICED).close()
    assert earlier(tmp_path) == 1000 and path.read_bytes() == before
    account = Account(tmp_path, PRICED)
    account.beat()
    account.close()
    assert 1000 < earlier(tmp_path) <= 1000 + job_seconds()  # includes the start-up of the second call's process


def test_killed_calls_are_charged_while_jobs_may_run(tmp_path: Path) -> None:
    call_before(tmp_path, seconds_ago=30 + job_seconds(), ended=False)
    assert earlier(tmp_path) == pytest.approx(1030, abs=5)
    path = call_before(tmp_path, seconds_ago=50_000, ended=False)
    with path.open("a") as file:
        file.write('{"tim')  # the call was killed while it wrote this line
    account = Account(tmp_path, PRICED)
    account.beat()
    assert earlier(tmp_path) > account.earlier.seconds == 1000 + ORPHAN_SECONDS


@pytest.mark.parametrize(
    "line",
    [
        '{"seconds": 5, "call": {"began": 1, "price_per_hour": 1, "earlier": {}}}',
        '{"time": "5", "price_per_hour": 1, "spent": {}}',
        '{"time": 1e308, "price_per_hour": 1, "spent": {}}',
        '{"time": 5, "price_per_hour": 1}',
        '{"time": 5, "price_per_hour": 1, "spent": {"usd": null}}',
        '{"time": 5, "price_per_hour": 1, "spent": {"usd": -5}}',
        '{"time": 5, "price_per_hour": NaN, "spent": {}}',
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    path = call_before(tmp_path, seconds_ago=4000, ended=True)
    first, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{{torn\n{line}\n{last}\n")
    assert earlier(tmp_path) == 1000
    note = f"NOTE: {tmp_path / ACCOUNT}: skipped 2 damaged lines, starting at line 2\n"
    assert capsys.readouterr().err == note
    path.write_text(f"{first}\n{last}\n{line}\n")
    with pytest.raises(BadInput, match="line 3 cannot be read, so the time and money spent until then are unknown; "):
        earlier(tmp_path)


def test_edited_lines_never_lower_the_totals(tmp_path: Path) -> None:
    path = call_before(tmp_path, seconds_ago=4000, ended=True)
    first, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{last}\n{last.replace('1000', '5')}\n")
    assert earlier(tmp_path) == 1000


def test_each_call_is_charged_at_its_price(tmp_path: Path) -> None:
    for price, usd in ((1.0, 1000 / 3600), (None, 2000 / 3600)):
        call_before(tmp_path, seconds_ago=4000, ended=True, price=price)
        account = Account(tmp_path, PRICED)
        spent, seconds_left = account.usd(), account.seconds_left()
        assert spent is not None and seconds_left is not None
        assert spent == pytest.approx(usd + 2 * account.process_seconds() / 3600, abs=1e-3)
        assert seconds_left == pytest.approx((10 - spent) / 2 * 3600, abs=1)
        account.close()


def test_calls_of_other_machines_use_the_disks_clock(tmp_path: Path) -> None:
    path = call_before(tmp_path, seconds_ago=50_000, ended=False)  # according to the other machine's clock
    text = path.read_text().replace('"ended": false}', '"ended": false, "machine": "another"}')
    path.write_text(text)
    assert earlier(tmp_path) == pytest.approx(1000, abs=5)
    os.utime(path, (time.time() - 30 - job_seconds(),) * 2)
    assert earlier(tmp_path) == pytest.approx(1030, abs=5)
    assert [file.name for file in tmp_path.iterdir()] == [ACCOUNT]
