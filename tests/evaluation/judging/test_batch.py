"""Batches: found again after any kill, never paid for twice, and read line by line."""

import signal
from collections import Counter
from typing import Any

import pytest

from evaluation.judging.prices import money
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import BATCH, PRICES, PROMPTS, SILENT, Result, Sessions, printed, wait_until
from tests.judge_server import ODD_LINES, Judge


def test_a_batch_costs_half_and_is_never_handed_over_twice(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    server.polls_before_end = 10**6
    process = launch.start(ROOT / "evaluate.py", *sessions.command(*BATCH))
    wait_until(lambda: any("batch_0" in path for path in server.paths))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    sessions.write(sessions.lines()[:-1])  # as if killed before the batch's name was noted
    server.polls_before_end = 0
    server.faults = {0: "duplicate line", 3: "cut off", 5: "500"}
    done = sessions.run()  # without --batch: it is waiting, and paid for
    assert "0 requests, 15 in a batch, 0 already answered, about $0.0000 at" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "batch batch_0: completed" in done.stderr
    assert sessions.result() == faultless
    assert list(server.batches) == ["batch_0"]
    assert Counter(server.paths)["POST /v1/responses"] == 2  # of 3 and 5, the dearer way
    sessions.check_paid_once(wrong=1)
    paid = 0.0
    for reply in sessions.replies():
        assert reply.usage is not None
        new = reply.usage.input - reply.usage.cached_input
        usd = new * 100 + reply.usage.cached_input * 10 + reply.usage.output * 1000
        paid += usd / 2 if reply.batch else usd
    assert paid / 1e6 == pytest.approx(server.usd(PRICES))
    assert f"including earlier sessions: {money(paid / 1e6)}\n" in done.stdout


def test_a_lost_reply_on_the_way_of_a_batch_is_not_paid_for_twice(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    faults = {"POST /v1/files": "lost", "POST /v1/batches": "lost", "GET /v1/batches/": "503", "GET /v1/files": "lost"}
    server.path_faults = dict(faults)
    done = sessions.run(*BATCH)
    assert done.returncode == 0, done.stderr
    assert (server.path_faults, list(server.batches)) == ({}, ["batch_0"])
    assert sessions.result() == faultless
    sessions.check_paid_once()
    server.path_faults = {"POST /v1/batches": "404"}
    done = sessions.run("--seed", "1", "--batch")
    assert done.stderr == f"evaluate.py: {server.url}: this server takes no batches; leave out --batch\n"


def test_a_batch_that_expires_is_handed_over_again_for_the_rest(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    server.batch_end = "expired"
    server.faults = {0: "prose", **{number: "500" for number in range(4, PROMPTS)}}
    first = sessions.run(*BATCH, "--api", "chat")
    assert first.returncode == 1
    assert "11 verdicts are missing: scripted; nothing is lost" in first.stderr
    server.batch_end, server.faults = "completed", {}
    done = sessions.run(*BATCH, "--api", "chat")
    assert done.returncode == 0, done.stderr
    assert "11 requests, 4 already answered" in done.stdout
    assert sessions.result() == faultless
    assert list(server.batches) == ["batch_0", "batch_1", "batch_2"]  # the second one of what was wrong
    sessions.check_paid_once(wrong=1)


def test_with_a_limit_a_batch_holds_what_it_has_room_for(server: Judge, sessions: Sessions) -> None:
    done = sessions.run("--effort", "none", *BATCH, "--max-usd", "1.9")
    assert done.returncode == 0, done.stderr
    assert len(server.batches) > 1
    assert server.usd(PRICES) <= 1.9


def test_odd_lines_of_a_batch_cost_no_other_ones(server: Judge, sessions: Sessions) -> None:
    server.faults = dict(enumerate(ODD_LINES))
    done = sessions.run(*SILENT, *BATCH)
    assert done.returncode == 1
    assert "NOTE: batch batch_0: 2 lines cannot be read; 3 requests without a reply count at the most" in done.stderr
    assert "no readable line in the batch's output" in done.stderr
    assert len(sessions.replies()) == PROMPTS - 3 + 2  # a string and an object are wrong verdicts, asked once more
    assert printed(done.stdout) >= server.usd(PRICES)
    done = sessions.run(*SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert server.billed == PROMPTS + 2 + 3
    assert printed(done.stdout) >= server.usd(PRICES)


@pytest.mark.parametrize("step", ["upload", "creation"])
def test_a_batch_that_is_out_does_not_use_up_the_limit_for_itself(server: Judge, sessions: Sessions, step: str) -> None:
    batch = (*SILENT, *BATCH, "--max-usd", "7")
    server.path_faults = {"POST /v1/batches": "500"} if step == "upload" else {"GET /v1/files": "401"}
    assert sessions.run(*batch).returncode == 1
    done = sessions.run(*batch)
    assert done.returncode == 0, done.stderr
    assert server.billed == PROMPTS
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def test_a_batch_of_an_overlapping_judgement_leaves_the_limit_as_it_is(server: Judge, sessions: Sessions) -> None:
    server.path_faults = {"GET /v1/files": "401"}
    assert sessions.run(*SILENT, *BATCH, "--orders", "2").returncode == 1
    done = sessions.run(*SILENT, "--orders", "3", "--max-usd", "0.6")
    assert done.returncode == 75, done.stderr
    assert printed(done.stdout) <= 0.6


def test_a_batch_of_an_earlier_version_counts_when_it_is_fetched(server: Judge, sessions: Sessions) -> None:
    server.path_faults = {"GET /v1/files": "401"}
    server.faults = dict.fromkeys(range(4), "500")
    assert sessions.run(*SILENT, *BATCH).returncode == 1
    lines = sessions.lines()
    for line in lines:
        line.get("batch", {}).pop("asked", None)
    sessions.write(lines)
    limit = server.usd(PRICES) + 0.5  # less than a request at its most
    done = sessions.run(*SILENT, "--max-usd", str(limit))
    assert (done.returncode, server.billed) == (75, PROMPTS - 4), done.stderr
    assert server.usd(PRICES) <= printed(done.stdout) <= limit


def test_error_lines_that_a_batch_file_repeats_free_their_money_once(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults = dict.fromkeys(range(8), "500")
    run = server.run_batch

    def repeated(batch: dict[str, Any]) -> None:
        run(batch)
        name = batch["error_file_id"]
        server.files[name] = b"\n".join([server.files[name]] * 6)

    monkeypatch.setattr(server, "run_batch", repeated)
    done = sessions.run(*SILENT, *BATCH, "--orders", "2")
    assert done.returncode == 1
    unbilled = [id for line in sessions.lines() for id in line.get("unbilled", [])]
    assert len(unbilled) == len(set(unbilled)) == 8
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def other_batches(server: Judge) -> None:
    """Put batches of another program into the server's list."""
    for number in range(5):
        name = f"other_{number}"
        batch = {"id": name, "object": "batch", "created_at": 0, "status": "completed", "input_file_id": "other"}
        server.batches[name] = {**batch, "completion_window": "24h", "endpoint": "/v1/responses", "polls": 0}


def as_if_killed_before_its_id_was_noted(sessions: Sessions) -> None:
    sessions.write([line for line in sessions.lines() if not line.get("batch", {}).get("id")])


def test_a_batch_far_down_the_list_is_found(server: Judge, sessions: Sessions) -> None:
    server.path_faults = {"GET /v1/batches/": "401"}
    assert sessions.run(*SILENT, *BATCH).returncode == 1
    as_if_killed_before_its_id_was_noted(sessions)
    other_batches(server)
    server.page_of_batches = 2
    done = sessions.run(*SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert (server.billed, len(server.batches)) == (PROMPTS, 1 + 5)


def test_a_batch_that_no_list_has_counts_at_its_most(server: Judge, sessions: Sessions) -> None:
    server.path_faults, server.unlisted = {"POST /v1/batches": "lost"}, {"batch_0"}
    assert sessions.run(*SILENT, *BATCH).returncode == 1
    server.run_batch(server.batches["batch_0"])
    done = sessions.run(*SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert "lists no batch of file file-0; its 15 requests count at the most that they can cost" in done.stderr
    assert server.billed == 2 * PROMPTS
    assert printed(done.stdout) >= server.usd(PRICES)


def test_a_batch_that_another_project_has_is_not_given_up(server: Judge, sessions: Sessions) -> None:
    server.path_faults = {"GET /v1/batches/": "404"}
    done = sessions.run(*SILENT, *BATCH)
    assert done.returncode == 1
    assert "batch batch_0: the server does not know it; its 15 requests may be paid for: use the key" in done.stderr
    done = sessions.run(*SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert (server.billed, list(server.batches)) == (PROMPTS, ["batch_0"])
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)
