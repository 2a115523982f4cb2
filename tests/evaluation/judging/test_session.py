"""Direct requests: no fault of the server loses a verdict, pays for one twice or makes a zero. Over real sockets."""

import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from evaluation.judging.cost import JudgeBudget
from evaluation.judging.store import StoreLine
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import (
    ANSWERED_AGAIN,
    PRICES,
    PROMPTS,
    REPEATED,
    SILENT,
    Result,
    Sessions,
    printed,
    wait_until,
)
from tests.judge_server import Judge


@pytest.mark.parametrize("fault", REPEATED + ANSWERED_AGAIN)
def test_no_fault_loses_or_doubles_a_verdict(server: Judge, sessions: Sessions, faultless: Result, fault: str) -> None:
    server.faults = {1: fault, 4: fault, 9: fault}
    quick = ("--timeout", "0.5") if fault == "slow" else ()
    done = sessions.run("--concurrency", "15", *quick)
    assert done.returncode == 0, done.stderr
    assert sessions.result() == faultless
    sessions.check_paid_once(wrong=3 if fault in ANSWERED_AGAIN else 0)
    assert all(body["text"]["format"]["strict"] and body["store"] is False for body in server.requests)


def test_chat_completions_say_the_same_whatever_happens(server: Judge, sessions: Sessions, faultless: Result) -> None:
    server.faults = dict(enumerate([*REPEATED, *ANSWERED_AGAIN]))
    done = sessions.run("--api", "chat", "--timeout", "0.5", "--concurrency", "15", "--effort", "low")
    assert done.returncode == 0, done.stderr
    assert sessions.result() == faultless | {"effort": "low"}
    assert set(server.paths) == {"POST /v1/chat/completions"}
    assert {body["reasoning_effort"] for body in server.requests} == {"low"}
    assert all(body["response_format"]["json_schema"]["strict"] for body in server.requests)
    sessions.check_paid_once(wrong=len(ANSWERED_AGAIN))


def test_a_server_that_names_a_time_is_left_alone_until_then(server: Judge, sessions: Sessions) -> None:
    server.faults, server.retry_after = {0: "429"}, "2"  # the client's own first wait is half a second at most
    assert sessions.run("--concurrency", "1", files=sessions.files[:1]).returncode == 0
    assert server.requests[0] == server.requests[1]
    assert server.times[1] - server.times[0] >= 2


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_refusals_are_left_out_for_all_alike_and_not_asked_again(server: Judge, sessions: Sessions, api: str) -> None:
    server.faults = {2: "refusal", 7: "refusal"}
    done = sessions.run("--api", api, "--allow-left-out", "20")
    assert done.returncode == 0, done.stderr
    assert "verdicts: 13 of 15, refused: 2" in done.stdout
    found = sessions.result()
    assert (found["left_out"], found["refused"]) == (2, 2)
    assert [(row["model"], row["score"]) for row in found["candidates"]] == [("good", 62), ("poor", 42)]  # no zeros
    too_many = sessions.run("--api", api)
    assert too_many.returncode == 1
    assert "2 of 15 prompts (13%) have no verdict, wanted at most 10 %: the result is not kept" in too_many.stderr
    assert server.billed == PROMPTS
    server.every = "refusal"
    alone = sessions.run("--api", api, files=sessions.files[:1])
    assert (alone.returncode, alone.stderr) == (
        1,
        "evaluate.py: scripted gave no verdict: refused: I cannot grade this.; pass another --model\n",
    )


def test_a_judge_that_gives_no_verdicts_is_paid_for_eight_and_not_again(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    server.every = "missing label"
    done = sessions.run()
    assert done.returncode == 1
    assert done.stderr == (
        "evaluate.py: scripted: 8 replies in a row are not valid verdicts, the last one: labels B, C, wanted A, B, C "
        f"once each; it says '{sessions.replies()[-1].text[:200]}'; they are stored, and not paid for again: pass "
        "another --model, or --retry-wrong, perhaps with another --api\n"
    )
    assert "cost, including earlier sessions: $" in done.stdout
    assert server.billed == len(sessions.replies()) == 8
    again = sessions.run()
    assert (again.stderr, server.billed) == (done.stderr, 8)
    server.every, server.retry_after = "500", "0.001"
    done = sessions.run("--retry-wrong")
    assert done.returncode == 1
    assert "15 verdicts are missing: 500: scripted 500; nothing is lost" in done.stderr
    assert not sessions.results.exists()
    server.every = None
    assert sessions.run("--retry-wrong").returncode == 0
    assert sessions.result() == faultless
    assert server.billed == 8 + PROMPTS


def test_a_prompt_with_two_wrong_verdicts_is_left_out_and_not_paid_for_again(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    server.faults, server.wrong_again = {2: "prose"}, True
    done = sessions.run()
    assert done.returncode == 0, done.stderr
    assert "invalid verdicts only: 1 prompts, which are not paid for again unless --retry-wrong" in done.stdout
    assert sessions.result()["left_out"] == 1
    assert (sessions.run().returncode, server.billed) == (0, PROMPTS + 1)
    server.wrong_again = False
    assert sessions.run("--retry-wrong").returncode == 0
    assert (sessions.result(), server.billed) == (faultless, PROMPTS + 2)


def test_a_killed_session_goes_on_and_a_finished_one_costs_nothing(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    server.faults, server.slow_seconds = {5: "slow", 6: "slow"}, 600
    process = launch.start(ROOT / "evaluate.py", *sessions.command("--concurrency", "2"))
    wait_until(lambda: server.billed == 7)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = len(sessions.replies())
    assert kept == 5
    store = sessions.store
    content = store.read_bytes()
    last_reply = content.index(b"\n", content.rindex(b'{"reply"'))
    store.write_bytes(content[: last_reply - 20])  # the last reply is torn as well
    asked = len(server.requests)
    done = sessions.run()
    assert done.returncode == 0, done.stderr
    assert f"{PROMPTS - kept + 1} requests, {kept - 1} already answered" in done.stdout
    assert len(server.requests) - asked == PROMPTS - kept + 1
    assert server.billed == PROMPTS  # what was paid for and lost is repeated, not billed again
    assert sessions.result() == faultless
    again = sessions.run(files=sessions.files[::-1])
    assert f"0 requests, {PROMPTS} already answered" in again.stdout
    assert len(server.requests) - asked == PROMPTS - kept + 1
    assert sessions.result(1)["differences"] == faultless["differences"]


def test_ctrl_c_keeps_what_is_in_flight(server: Judge, sessions: Sessions) -> None:
    server.faults, server.slow_seconds = {3: "slow", 4: "slow"}, 600
    process = launch.start(ROOT / "evaluate.py", *sessions.command("--concurrency", "2"))
    wait_until(lambda: server.billed == 5)
    locked = sessions.run()
    assert locked.returncode == 1
    assert "verdicts.jsonl: another judge holds it; wait for it" in locked.stderr
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopping: waiting for requests in flight; press Ctrl-C again to abandon them\n"
    server.released.set()
    output, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    assert "interrupted: 10 verdicts are missing" in output
    assert len(sessions.replies()) == server.billed == 5


def test_a_prompt_that_the_server_does_not_take_holds_up_no_other(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    server.faults = {0: "400", 4: "400", PROMPTS + 3: "400"}
    most = ("--allow-left-out", "20")
    done = sessions.run("--concurrency", "1", *most)
    assert done.returncode == 0, done.stderr
    assert "rejected by the server: 2 prompts, such as 'Instruction 0': 400: scripted 400" in done.stdout
    assert (sessions.result()["left_out"], sessions.result()["refused"]) == (2, 0)
    server.every = "400"
    assert sessions.run(*most).returncode == 0  # these two again; others were answered
    server.every = None
    assert sessions.run().returncode == 0  # they are asked again, as the server may take it now
    assert sessions.result() == faultless
    done = sessions.run("--effort", "low", "--batch", "--poll-seconds", "0.05")
    assert (done.returncode, sessions.result()["left_out"]) == (0, 1), done.stderr
    asked, server.every = len(server.requests), "400"
    done = sessions.run("--effort", "high", "--concurrency", "1")
    assert (done.returncode, done.stderr) == (1, f"evaluate.py: {server.url}: 400: scripted 400\n")
    assert len(server.requests) - asked == 8


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    server: Judge, sessions: Sessions, faultless: Result
) -> None:
    full = launch.run(ROOT / "evaluate.py", *sessions.command(), file_bytes=4000)
    assert (full.returncode, full.stderr.count("\n")) == (1, 1), full.stderr
    assert "verdicts.jsonl: cannot be written" in full.stderr
    assert 0 < len(server.prompts) < PROMPTS
    assert sessions.run().returncode == 0
    assert sessions.result() == faultless
    sessions.check_paid_once()


@pytest.mark.parametrize(
    "fault", ["slow", "half a body", "less than a body", "billed and dropped", "504", "408", "425", "499"]
)
def test_what_was_billed_without_an_answer_counts_for_ever(server: Judge, sessions: Sessions, fault: str) -> None:
    server.idempotent, server.slow_seconds = False, 3
    server.faults = {0: fault, 3: fault, 9: fault}
    done = sessions.run(*SILENT, "--timeout", "1")
    assert done.returncode == 0, done.stderr
    assert (len(server.bill), server.billed, len(sessions.replies())) == (PROMPTS + 3, PROMPTS + 3, PROMPTS)
    assert sessions.unanswered() == set(server.bill) - {reply.asked for reply in sessions.replies()}
    assert "for 3 requests without an answer or count, which may have been billed" in done.stdout
    assert printed(done.stdout) >= server.usd(PRICES)
    assert printed(sessions.run(*SILENT).stdout) == printed(done.stdout)


@pytest.mark.parametrize("fault", ["429", "500", "503", "400"])
def test_what_the_server_says_has_failed_counts_as_nothing(server: Judge, sessions: Sessions, fault: str) -> None:
    server.faults = {0: fault}
    done = sessions.run(*SILENT)
    assert done.returncode == 0, done.stderr
    assert not sessions.unanswered()
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def test_a_server_without_replies_is_asked_eight_times(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.every = False, "billed and dropped"
    done = sessions.run("--concurrency", "64")
    assert done.returncode == 1
    assert server.billed == 8


def test_a_killed_session_counts_what_was_in_flight(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.slow_seconds, server.faults = False, 600, {4: "slow", 5: "slow"}
    process = launch.start(ROOT / "evaluate.py", *sessions.command(*SILENT, "--concurrency", "2"))
    wait_until(lambda: server.billed == 6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(sessions.unanswered()) == 2
    done = sessions.run(*SILENT)
    assert done.returncode == 0, done.stderr
    assert server.billed == PROMPTS + 2
    assert printed(done.stdout) >= server.usd(PRICES)


def test_requests_begin_one_at_a_time_and_are_halved_after_a_fault(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers the oldest request when as many are in flight as may be: no timing decides their number."""
    server.retry_after = "0"
    in_flight: list[Future[str | None]] = []  # faults to come, oldest request first
    at_once: list[int] = []  # how many were in flight when each came
    answered, allowed = 0, 1
    real, lock = server.fault_of, threading.Lock()

    def gated(key: str, body: dict[str, Any]) -> str | None:
        nonlocal answered, allowed
        real(key, body)
        with lock:
            in_flight.append(mine := Future())
            at_once.append(len(in_flight))
        time.sleep(0.05)  # one too many would come now
        with lock:
            while in_flight and len(in_flight) >= min(allowed, PROMPTS + 8 - answered):
                fault = "429" if 8 <= answered < 16 else None
                answered += 1
                allowed = max(1, allowed // 2) if fault else min(allowed + 1, 4)
                in_flight.pop(0).set_result(fault)
        return mine.result(60)

    monkeypatch.setattr(server, "fault_of", gated)
    assert sessions.run(*SILENT, "--concurrency", "4").returncode == 0
    one_more_each = [1, *(1, 2), *(2, 3), *(3, 4)]
    assert at_once == [*one_more_each, *[4] * 5, *[1] * 4, *one_more_each]  # four and more faults leave one at a time


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_odd_replies_cost_no_other_ones(server: Judge, sessions: Sessions, api: str) -> None:
    server.faults = {0: "odd choices", 4: "error in 200", 5: "fenced", 6: "numbers in strings", 7: "halves"}
    done = sessions.run("--api", api)
    assert done.returncode == 0, done.stderr
    assert server.billed == len(sessions.replies()) == PROMPTS + 2
    assert "scripted overload" in [reply.error for reply in sessions.replies()]


@pytest.mark.parametrize("options", [(), ("--batch", "--poll-seconds", "0.05")], ids=str)
def test_a_reply_that_repeats_a_key_is_kept(server: Judge, sessions: Sessions, options: tuple[str, ...]) -> None:
    server.idempotent, server.faults = False, {0: "repeated key", 5: "repeated key"}
    done = sessions.run(*options)
    assert done.returncode == 0, done.stderr
    assert server.billed == len(sessions.replies()) == PROMPTS


def test_an_error_of_this_program_loses_no_reply_that_is_in_flight(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults, server.slow_seconds = {5: "slow", 6: "slow"}, 600

    def broken(budget: JudgeBudget, line: StoreLine) -> bool:
        noted = note(budget, line)
        if len(budget.store.in_order) == 6 and not server.released.is_set():  # the first that overtakes the slow ones
            server.released.set()
            raise RuntimeError("a fault of ours")
        return noted

    note = JudgeBudget.note
    monkeypatch.setattr(JudgeBudget, "note", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        sessions.run()
    assert not sessions.unanswered()
    assert len(sessions.replies()) == server.billed < PROMPTS


def test_asking_wrong_ones_again_is_not_done_until_they_are_answered(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.faults, server.wrong_again = False, {0: "prose"}, True
    assert sessions.run(*SILENT).returncode == 0
    retry = (*SILENT, "--retry-wrong")
    done = sessions.run(*retry, "--max-usd", str(server.usd(PRICES) + 0.3))
    assert done.returncode == 75, done.stderr
    assert "--max-usd: 1 verdicts are missing, and the next one may cost up to" in done.stdout
    server.every = "billed and dropped"
    done = sessions.run(*retry)
    assert done.returncode == 1
    assert "1 verdicts are missing: " in done.stderr
    server.every = None
    done = sessions.run(*retry)
    assert (done.returncode, sessions.result()["left_out"]) == (0, 1), done.stderr


def test_eight_wrong_verdicts_by_one_api_are_asked_again_by_the_other(server: Judge, sessions: Sessions) -> None:
    server.every = "prose"
    done = sessions.run()
    assert "--retry-wrong, perhaps with another --api" in done.stderr
    server.every = None
    done = sessions.run("--retry-wrong", "--api", "chat")
    assert done.returncode == 0, done.stderr
