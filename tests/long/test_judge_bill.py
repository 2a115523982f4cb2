"""A judge server with every kind of fault, in random mixtures, and sessions that are killed: its bill and the print.

The server knows no Idempotency-Key, as OpenAI documents none, and keeps its own bill. As a command, one mixture and its
row of the table: `python -m tests.long.test_judge_bill --seed 1`.
"""

import argparse
import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

from evaluation.judging.replies import UNBILLED
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import quality, read_store, write
from tests.judge_server import BATCH_MIXTURE, MIXTURE, Judge, serve

Setting = tuple[int, str, str, int, float]
QUESTIONS, ORDERS = 60, 3
KILLS = 20
MODEL = "gpt-5-mini"
PRICES = {
    "date": "2026-08",
    "batch_discount": 0.5,
    "usd_per_million_tokens": {MODEL: {"input": 0.25, "cached_input": 0.025, "output": 2.0}},
}
MIXTURES = {
    "all faults": MIXTURE,
    "batch": BATCH_MIXTURE,
    "timeouts": {"slow": 600},  # of 1000
    "half replies": {"half a body": 600},
    "long replies": {"long": 1000},
    "ignored limit": {"long": 1000},
    "odd counts": {"more cached than read": 1000},
}
SETTINGS = [  # seed, mixture, API, concurrency, --max-usd: of some what all may cost, of others less
    (1, "all faults", "responses", 8, 4.0),
    (2, "all faults", "chat", 8, 4.0),
    (3, "all faults", "responses", 64, 4.0),
    (4, "all faults", "chat", 64, 1.0),
    (5, "all faults", "responses", 1, 0.3),
    (6, "batch", "responses", 8, 4.0),
    (7, "batch", "chat", 8, 0.6),
    (8, "timeouts", "responses", 8, 0.6),
    (9, "half replies", "responses", 8, 0.6),
    (10, "long replies", "responses", 64, 0.6),
    (11, "odd counts", "responses", 8, 0.6),
    (12, "ignored limit", "responses", 8, 0.6),
]
HEAD = "seed  mixture       at once  sessions  kills  billed  kept  lost   bill $  print $    max $  status  verdicts"


@attrs.frozen
class Outcome:
    """What sessions with one mixture have come to."""

    row: str
    verdicts: int


def walk(folder: Path, setting: Setting) -> Outcome:
    """Run sessions, killing the first ones, until one ends by itself with nothing left or nothing allowed."""
    seed, mixture, api, concurrency, most_usd = setting
    (folder / "prices.json").write_text(json.dumps(PRICES))
    files = [write(folder, name, level, questions=range(QUESTIONS)) for name, level in (("good", 60), ("poor", 40))]
    chance = random.Random(seed)
    with serve(quality) as server:
        server.chance, server.idempotent = random.Random(seed), False
        server.retry_after, server.slow_seconds = "0.01", 1.0
        server.mixture, server.polls_before_end, server.page_of_batches = MIXTURES[mixture], 5, 1
        server.ignores_limit = mixture == "ignored limit"
        options = ["--api", api, *(["--batch", "--poll-seconds", "0.1"] if mixture == "batch" else [])]
        options += ["--model", MODEL, "--base-url", server.url, "--max-usd", str(most_usd)]
        options += ["--verdicts", str(folder / "verdicts.jsonl"), "--prices", str(folder / "prices.json")]
        options += ["--timeout", "0.5", "--concurrency", str(concurrency), "--orders", str(ORDERS), "--retry-wrong"]
        command = ["judge", *map(str, files), *options, "--allow-left-out", "99"]
        kills = sessions = 0
        status, printed = None, 0.0
        while status not in (0, 75):
            process = launch.start(ROOT / "evaluate.py", *command)
            sessions += 1
            assert sessions < 3 * KILLS
            if kills < KILLS and wait_for_requests(
                server, process, len(server.paths) + chance.randrange(1, 4 if mixture == "batch" else 9)
            ):
                time.sleep(chance.random() / 20)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
            else:
                output, errors = process.communicate()
                status = process.returncode
                assert "Traceback" not in errors, errors
                printed = printed_usd(output + errors)
                status = 75 if "nothing was sent: allow more" in errors else status
            settle(server)
            bill = server.usd(PRICES)
            assert bill <= most_usd, "--max-usd does not hold by the server's count"
            assert status is None or bill <= printed, (bill, printed, output)
            check(server, folder / "verdicts.jsonl")
        kept, lost, verdicts = check(server, folder / "verdicts.jsonl")
    row = (
        f"{seed:4}  {mixture:12}  {concurrency:7}  {sessions:8}  {kills:5}  {len(server.bill):6}  {kept:4}  {lost:4}  "
    )
    return Outcome(row + f"{bill:7.4f}  {printed:7.4f}  {most_usd:7.4f}  {status:6}  {verdicts:8}", verdicts)


def wait_for_requests(server: Judge, process: Any, count: int) -> bool:
    """Wait until so many have come; False: the session has ended before."""
    while len(server.paths) < count:
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    return True


def settle(server: Judge) -> None:
    """Wait until the server has billed what a killed session has sent."""
    before = -1
    while before < len(server.paths):
        before = len(server.paths)
        time.sleep(0.2)


def printed_usd(output: str) -> float:
    costs = re.findall(r"including earlier sessions: (?:at most )?\$([\d.]+)|beside \$([\d.]+) that earlier", output)
    return float("".join(costs[-1]))


def check(server: Judge, file: Path) -> tuple[int, int, int]:
    """Hold the file against the bill; return how many billed requests are kept, how many lost, and the verdicts."""
    store = read_store(file)
    asked = [reply.asked for reply in store.in_order]
    assert len(asked) == len(set(asked)), "a reply is kept twice"
    kept = Counter(reply.key for reply in store.in_order if reply.usage != UNBILLED)
    lost_or_open = {id: one.key for id, one in store.open.items()}
    sent = {id: one for history in store.prompts.values() for id, one in history.asked.items()}
    unanswered = Counter(lost_or_open.values())
    lost = Counter(one.key for one in server.bill.values())
    lost.subtract(kept)
    assert all(0 <= lost[key] <= unanswered[key] for key in lost), "billed = kept + billed without an answer"
    if not server.batches:
        assert set(server.bill) == set(asked) | (set(server.bill) & set(lost_or_open)), "the same, one by one"
        assert not set(asked) & set(lost_or_open)
    for id, one in server.bill.items():
        if id in sent and not server.ignores_limit:
            most = sent[id].most
            assert one.input <= most.input and one.output <= most.output, "more was billed than it was allowed"
    verdicts = sum(history.verdict(3) is not None for history in store.prompts.values())
    return sum(kept.values()), sum(lost.values()), verdicts


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_bill_is_what_is_kept_and_lost_and_never_above_the_print(tmp_path: Path, setting: Setting) -> None:
    outcome = walk(tmp_path, setting)
    print(f"\n{HEAD}\n{outcome.row}")
    assert outcome.verdicts > 0.9 * QUESTIONS * ORDERS or setting[-1] < 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="*", default=[seed for seed, *_ in SETTINGS])
    print(HEAD)
    for setting in SETTINGS:
        if setting[0] in parser.parse_args().seed:
            with tempfile.TemporaryDirectory() as temporary:
                print(walk(Path(temporary), setting).row, flush=True)
