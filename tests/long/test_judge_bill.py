"""What a judge costs if its server has all kinds of faults, in random mixtures, and if sessions are killed.

The server ignores Idempotency-Key, because OpenAI does not document it, and computes its own bill. The bill must never
exceed the printed maximum.
"""

import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from common.checks import structured
from common.json_files import read_json_lines
from evaluation.judging.store import StoreLine
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import quality, read_store, write
from tests.judge_server import MIXTURE, Judge, serve
from tests.launch import wait_until

Setting = tuple[int, str, int, float]
QUESTIONS, ORDERS = 60, 3
KILLS = 20
MODEL = "gpt-5-mini"
PRICES = {"date": "2026-08", "usd_per_million_tokens": {MODEL: {"input": 0.25, "cached_input": 0.025, "output": 2.0}}}
MIXTURES = {
    "all faults": MIXTURE,
    "timeouts": {"slow": 600},  # 600 of 1000 requests
    "half replies": {"half a body": 600},
    "long replies": {"long": 1000},
    "odd counts": {"more cached than read": 1000},
}
# Seed, mixture, concurrency, --max-usd. In some settings, --max-usd is enough for all requests.
SETTINGS = [
    (1, "all faults", 8, 8.0),
    (2, "all faults", 64, 8.0),
    (3, "all faults", 64, 1.0),
    (4, "all faults", 1, 0.3),
    (5, "timeouts", 8, 0.6),
    (6, "half replies", 8, 0.6),
    (7, "long replies", 64, 0.6),
    (8, "odd counts", 8, 0.6),
]


def walk(folder: Path, setting: Setting) -> tuple[str, int]:
    """Run sessions until a session finishes or reaches --max-usd. Up to KILLS sessions are killed before that.

    Return a line with the results, and the number of verdicts.
    """
    seed, mixture, concurrency, most_usd = setting
    (folder / "prices.json").write_text(json.dumps(PRICES))
    files = [write(folder, name, level, questions=range(QUESTIONS)) for name, level in (("good", 60), ("poor", 40))]
    chance = random.Random(seed)
    with serve(quality) as server:
        server.chance, server.idempotent = random.Random(seed), False
        server.retry_after, server.slow_seconds = "0.01", 1.0
        server.mixture = MIXTURES[mixture]
        options = ["--model", MODEL, "--base-url", server.url, "--max-usd", str(most_usd)]
        options += ["--verdicts", str(folder / "verdicts.jsonl"), "--prices", str(folder / "prices.json")]
        options += ["--timeout", "0.5", "--concurrency", str(concurrency), "--orders", str(ORDERS), "--retry-wrong"]
        command = ["judge", *map(str, files), *options, "--allow-left-out", "99"]
        kills = sessions = 0
        status, printed = None, 0.0
        while status not in (0, 75):
            process = launch.start(ROOT / "evaluate.py", *command)
            sessions += 1
            assert sessions < 3 * KILLS
            if kills < KILLS and wait_for_requests(server, process, len(server.requests) + chance.randrange(1, 9)):
                time.sleep(chance.random() / 20)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
            else:
                output, errors = process.communicate()
                status = process.returncode
                assert "Traceback" not in errors, errors
                printed = printed_usd(output + errors)
                status = 75 if "nothing was sent: raise --max-usd" in errors else status
            settle(server)
            bill = server.usd(PRICES)
            assert bill <= most_usd, "the server's bill exceeds --max-usd"
            assert status is None or bill <= printed, (bill, printed, output)
            check(server, folder / "verdicts.jsonl")
        kept_replies, lost_replies, verdicts = check(server, folder / "verdicts.jsonl")
    row = f"{mixture}: {sessions} sessions, {kills} kills, {len(server.bill)} billed, {kept_replies} kept, "
    row += f"{lost_replies} lost, bill {bill:.4f}, print {printed:.4f} of {most_usd} dollars, status {status}"
    return row, verdicts


def wait_for_requests(server: Judge, process: Any, count: int) -> bool:
    """Wait until the server has received `count` requests. Return False if the session ended first."""
    wait_until(lambda: len(server.requests) >= count or process.poll() is not None, seconds=600)
    return len(server.requests) >= count


def settle(server: Judge) -> None:
    """Wait until the server has billed the requests that a killed session sent."""
    before = -1
    while before < len(server.requests):
        before = len(server.requests)
        time.sleep(0.2)


def printed_usd(output: str) -> float:
    costs = re.findall(
        r"including earlier sessions: (?:at most )?\$([\d.]+)|in addition to \$([\d.]+) for earlier", output
    )
    return float("".join(costs[-1]))


def check(server: Judge, file: Path) -> tuple[int, int, int]:
    """Compare the replies that are stored in the file with the server's bill.

    Return the number of billed requests with a stored reply, the number of billed requests without one, and the number
    of verdicts.
    """
    store = read_store(file)
    kept_ids = [reply.asked for reply in store.replies]
    assert len(kept_ids) == len(set(kept_ids)), "a reply is stored twice"
    assert store.open.keys() & kept_ids == {reply.asked for reply in store.replies if reply.usage is None}
    lost_ids = set(server.bill) - set(kept_ids)
    assert set(kept_ids) <= set(server.bill) and lost_ids <= store.open.keys(), "each billed request is stored or open"
    lines = read_json_lines(file, lambda line: structured(line, StoreLine, unknown_keys=True)).records
    allowed_usage = {line.asked.id: line.asked.most for line in lines if line.asked}
    for id, request in server.bill.items():
        limit = allowed_usage[id]
        assert request.input <= limit.input and request.output <= limit.output, (
            "a request was billed for more than its maximum"
        )
    verdicts = sum(any(reply.problem(3) is None for reply in replies) for replies in store.by_prompt.values())
    return len(kept_ids), len(lost_ids), verdicts


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_bill_never_exceeds_the_printed_maximum(tmp_path: Path, setting: Setting) -> None:
    row, verdicts = walk(tmp_path, setting)
    print(f"\n{row}")
    assert verdicts > 0.9 * QUESTIONS * ORDERS or setting[-1] < 2
