"""Sessions over real sockets: no fault of the server causes a verdict to be lost, paid for twice, or read as zero."""

import re
import signal

import httpx2
import pytest

from evaluation.judging.client import _asked_pause
from evaluation.judging.judgment import Judgment
from evaluation.judging.store import StoreLine, VerdictStore
from tests import launch
from tests.conftest import ROOT, one_line, only_line
from tests.evaluation.judging.sessions import PRICES, PROMPTS, SILENT, Result, Sessions, printed
from tests.judge_server import GATEWAY_FAULTS, WRONG_USAGES, Judge
from tests.launch import wait_until

ANSWERED_AGAIN = ["cut off", "wrong labels", "missing label", "duplicate label", "too high", "no number", "prose"]
ODD = ["fenced", "odd choices", "numbers in strings", "error in 200", "halves", "repeated key"]
REPEATED = ["429", "500", "503", "dropped", "billed and dropped", "slow", "less than a body"]


@pytest.mark.parametrize("faults", [REPEATED, ANSWERED_AGAIN, ODD], ids=["repeated", "answered again", "odd"])
def test_faults_neither_lose_nor_repeat_verdicts(
    server: Judge, sessions: Sessions, faultless: Result, faults: list[str]
) -> None:
    server.faults, server.slow_seconds = dict(enumerate(faults, 1)), 12
    sessions.said("--concurrency", "15", "--timeout", "4", "--effort", "low")
    assert sessions.result() == faultless | {"effort": "low"}
    again = {"odd choices", "error in 200", *ANSWERED_AGAIN}
    sessions.check_paid_once(wrong=len(again.intersection(faults)))
    assert all(body["response_format"]["json_schema"]["strict"] for body in server.requests)
    assert {body["reasoning_effort"] for body in server.requests} == {"low"}


def test_refused_prompts_are_left_out_and_not_repeated(server: Judge, sessions: Sessions) -> None:
    server.faults = {2: "refusal", 7: "refusal"}
    done = sessions.said("--allow-left-out", "20")
    assert "verdicts: 13 of 15, refused: 2" in done
    stored = sessions.result()
    assert (stored["left_out"], stored["refused"]) == (2, 2)
    # Refusals do not count as zeros.
    assert [(row["model"], row["score"]) for row in stored["candidates"]] == [
        ("good", 62),
        ("poor", 42),
    ]
    too_many = "2 of 15 prompts (13%) have no verdict, wanted at most 10%, so the result was not stored"
    assert too_many in one_line(sessions.run())
    assert server.billed == PROMPTS
    server.every = "refusal"
    alone = sessions.run(files=sessions.files[:1])
    error = "evaluate.py: scripted gave no verdict: refused: I cannot grade this.; pass another --model\n"
    assert (alone.returncode, alone.stderr) == (1, error)


def test_useless_judge_is_paid_for_eight_replies_only(server: Judge, sessions: Sessions, faultless: Result) -> None:
    server.every = "missing label"
    done = sessions.run("--concurrency", "64")
    assert done.returncode == 1
    assert done.stderr == (
        "evaluate.py: scripted: 8 replies in a row were not valid verdicts, the last one because of labels B, C, "
        f"wanted each of A, B, C once, in the reply '{sessions.replies()[-1].text[:200]}'; they are stored and will "
        "not be paid for again; pass another --model, or --retry-wrong\n"
    )
    assert "cost, including earlier sessions: $" in done.stdout
    assert server.billed == len(sessions.replies()) == 8
    again = sessions.run()
    assert (again.stderr, server.billed) == (done.stderr, 8)
    server.every, server.retry_after = "500", "0.001"
    assert "15 verdicts are missing: 500: scripted 500; nothing is lost" in one_line(sessions.run("--retry-wrong"))
    assert not sessions.results.exists()
    server.every = None
    sessions.said("--retry-wrong")
    assert sessions.result() == faultless
    assert server.billed == 8 + PROMPTS


def test_retry_after_number_sets_the_pause() -> None:
    for header, seconds in (("0.5", 0.5), ("999", 60), ("1.2.3", 0), ("soon", 0)):
        assert _asked_pause(httpx2.Response(429, headers={"Retry-After": header})) == seconds


def test_twice_invalid_prompt_is_left_out(server: Judge, sessions: Sessions, faultless: Result) -> None:
    server.faults, server.wrong_again = {2: "prose"}, True
    done = sessions.said()
    assert "prompts with only invalid verdicts: 1; to retry them, which costs money again, pass --retry-wrong" in done
    assert sessions.result()["left_out"] == 1
    assert (sessions.run().returncode, server.billed) == (0, PROMPTS + 1)
    server.wrong_again = False
    sessions.said("--retry-wrong")
    assert (sessions.result(), server.billed) == (faultless, PROMPTS + 2)


def test_killed_session_continues_without_repaying(server: Judge, sessions: Sessions, faultless: Result) -> None:
    server.faults, server.slow_seconds = {5: "slow", 6: "slow"}, 600
    process = launch.start(ROOT / "evaluate.py", *sessions.command("--concurrency", "2"))
    wait_until(lambda: server.billed == 7)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    replies = len(sessions.replies())
    assert (replies, len(sessions.unanswered())) == (5, 2)
    store = sessions.store
    content = store.read_bytes()
    last_reply = content.index(b"\n", content.rindex(b'{"reply"'))
    store.write_bytes(content[: last_reply - 20])  # the last reply is incomplete as well
    requests = len(server.requests)
    done = sessions.said()
    assert f"{PROMPTS - replies + 1} requests, {replies - 1} already answered" in done
    assert len(server.requests) - requests == PROMPTS - replies + 1
    # The server repeats a lost reply that was paid for, but does not bill it again.
    assert len(server.replies) == PROMPTS
    assert sessions.result() == faultless
    assert printed(done) >= server.usd(PRICES)
    again = sessions.run(files=sessions.files[::-1])
    assert f"0 requests, {PROMPTS} already answered" in again.stdout
    assert len(server.requests) - requests == PROMPTS - replies + 1
    assert sessions.result(1)["differences"] == faultless["differences"]


def test_ctrl_c_waits_for_requests_in_flight(server: Judge, sessions: Sessions) -> None:
    server.faults, server.slow_seconds = {3: "slow", 4: "slow"}, 600
    process = launch.start(ROOT / "evaluate.py", *sessions.command("--concurrency", "2"))
    wait_until(lambda: server.billed == 5)
    assert "verdicts.jsonl: in use by another judge session; wait for it" in one_line(sessions.run())
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopping: waiting for requests in flight; press Ctrl-C again to abandon them\n"
    server.released.set()
    output, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    assert "interrupted: 10 verdicts are missing" in output
    assert len(sessions.replies()) == server.billed == 5


def test_rejected_prompt_does_not_stop_the_others(server: Judge, sessions: Sessions, faultless: Result) -> None:
    server.faults = {0: "400", 4: "400"}
    done = sessions.said("--allow-left-out", "20")
    assert "prompts rejected by the server: 2, for example 'Instruction " in done
    assert (sessions.result()["left_out"], sessions.result()["refused"]) == (2, 0)
    sessions.said()  # rejected prompts are sent again, because the server may accept them now
    assert sessions.result() == faultless
    server.every = "400"
    done = sessions.run("--effort", "high")
    assert (done.returncode, len(server.requests)) == (1, PROMPTS + 2 + 8)
    assert "7 verdicts are missing: 400: scripted 400" in done.stderr


def test_session_continues_after_a_full_disk(server: Judge, sessions: Sessions, faultless: Result) -> None:
    full = launch.run(ROOT / "evaluate.py", *sessions.command(), file_bytes=4000)
    assert "verdicts.jsonl: cannot be written" in only_line(full)
    assert 0 < len(server.said) < PROMPTS
    sessions.said()
    assert sessions.result() == faultless
    assert len(server.replies) == PROMPTS


def test_unanswered_billed_requests_always_count(server: Judge, sessions: Sessions) -> None:
    """A request whose reply was incomplete or lost counts as billed, and is not sent again in the session."""
    faults = ["slow", "half a body", "less than a body", "billed and dropped", *GATEWAY_FAULTS]
    failed = ["429", "500", "503", "400"]  # the API itself reports these errors, so the requests cost nothing
    server.idempotent, server.slow_seconds, server.faults = False, 12, dict(enumerate([*faults, *failed]))
    sessions.run(*SILENT, "--timeout", "4")
    done = sessions.said(*SILENT)
    unanswered = len(faults)
    assert (server.billed, len(sessions.replies())) == (PROMPTS + unanswered, PROMPTS)
    assert sessions.unanswered() == set(server.bill) - {reply.asked for reply in sessions.replies()}
    assert f"for {unanswered} requests without an answer or a token count, which may have been billed" in done
    assert printed(done) >= server.usd(PRICES)
    assert printed(sessions.run(*SILENT).stdout) == printed(done)


def test_dead_server_gets_eight_requests(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.every = False, "billed and dropped"
    assert (sessions.run("--concurrency", "64").returncode, server.billed) == (1, 8)


def test_internal_error_loses_no_reply_in_flight(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults, server.slow_seconds = {5: "slow", 6: "slow"}, 600

    def broken(store: VerdictStore, line: StoreLine) -> None:
        append(store, line)
        if len(store.replies) == 6 and not server.released.is_set():  # the first reply that overtakes the slow replies
            server.released.set()
            raise RuntimeError("a fault of ours")

    append = VerdictStore.append
    monkeypatch.setattr(VerdictStore, "append", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        sessions.run()
    assert not sessions.unanswered()
    assert len(sessions.replies()) == server.billed < PROMPTS


def test_concurrency_grows_with_verdicts(server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = [0]

    def count_calls(name: str, change: int) -> None:
        method = getattr(Judgment, name)

        def called(judgment: Judgment, *arguments: object) -> bool:
            in_flight.append(in_flight[-1] + change)
            return bool(method(judgment, *arguments))

        monkeypatch.setattr(Judgment, name, called)

    count_calls("reserve", 1)
    count_calls("take", -1)
    sessions.said(*SILENT, "--concurrency", "4")
    assert (in_flight[:4], max(in_flight)) == ([0, 1, 0, 1], 4)


def test_spending_never_exceeds_the_limit(server: Judge, sessions: Sessions, faultless: Result) -> None:
    silent = (*SILENT, "--concurrency", "1")  # short replies without reasoning
    refused = sessions.run(*silent, "--max-usd", "0.5")
    assert "--max-usd: got 0.5, but 15 requests may cost about $" in one_line(refused)
    assert server.requests == []
    estimate = float(re.findall(r"about \$([\d.]+)", refused.stderr)[0])
    # The session becomes more expensive than planned.
    server.faults, server.wrong_again = (
        dict.fromkeys((0, 2, 4, 6, 8, 10), "wrong labels"),
        True,
    )
    done = sessions.run(*silent, "--max-usd", str(estimate * 1.05))
    spent = float(re.findall(r"sessions: \$([\d.]+)", done.stdout)[0])
    assert (done.returncode, done.stderr) == (75, "")
    assert estimate * 0.5 < spent <= estimate * 1.05
    assert spent == pytest.approx(server.usd(PRICES), abs=1e-4)
    assert re.search(r"verdicts are missing, and the next one may cost up to \$\d+\.\d+; nothing is lost", done.stdout)
    server.wrong_again, billed = False, server.billed
    again = sessions.run(*silent, "--max-usd", str(spent + 0.1))
    assert (again.returncode, server.billed) == (1, billed)  # the limit includes the cost of earlier sessions
    assert f"in addition to ${spent:.4f} for earlier sessions; nothing was sent" in again.stderr
    sessions.said(*silent, "--retry-wrong", "--max-usd", str(estimate * 3))
    assert sessions.result() == faultless | {"effort": "none"}


def test_timeouts_and_wrong_counts_respect_the_limit(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.every = False, "slow"
    done = sessions.run(*SILENT, "--timeout", "0.2", "--max-usd", "4", "--concurrency", "64")
    assert done.returncode == 75, done.stderr
    assert 0 < server.usd(PRICES) <= printed(done.stdout) <= 4
    assert sessions.run(*SILENT, "--timeout", "0.2", "--max-usd", "4").returncode == 1
    assert server.usd(PRICES) <= 4
    sessions.store.unlink()
    server.said, server.bill, server.every = {}, {}, None
    server.faults = dict(enumerate(["more cached than read", *WRONG_USAGES]))
    done = sessions.said(*SILENT)
    assert f"for {len(server.faults)} requests without an answer or a token count" in done
    assert printed(done) >= server.usd(PRICES)
    assert printed(sessions.run(*SILENT).stdout) == printed(done)
    assert server.billed == PROMPTS
