"""What a judge costs and what it leaks: bill, limits and secrets, against a server that knows no Idempotency-Key."""

import asyncio
import json
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.judging import asking, transport
from evaluation.judging import command as command_module
from evaluation.judging.client import NoReply, ask, problem_in
from evaluation.judging.prompt import Judge as WhoIsAsked
from evaluation.judging.transport import find_key, open_client, split_credentials
from evaluation.judging.verdicts import Asked, Reply, Usage, VerdictStore
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.test_judge import (
    PRICES,
    PROMPTS,
    command,
    files,
    judge,
    replies,
    result,
    server,
    wait_until,
)
from tests.judge_server import ODD_LINES, Judge

__all__ = ["files", "server"]  # fixtures

SILENT = ("--effort", "none")
BODY = {"model": "m", "input": '{"answers": {"A": "1"}}', "max_output_tokens": 99}
WHO = WhoIsAsked(model="m", effort=None, base_url="", api="responses")


def printed(output: str) -> float:
    return float(re.findall(r"earlier sessions paid: (?:at most )?\$([\d.]+)", output)[-1])


def unanswered(files: list[Path]) -> set[str]:
    store = VerdictStore(files[0].parents[2] / "verdicts.jsonl")
    store.close()
    return set(store.unanswered)


def asked_once(server: Judge, seconds: float = 5.0, credentials: tuple[str, str] | None = None) -> Reply:
    """Send one request, in this process."""
    asked = Asked(id="i", key="k", judge="j", answers=1, sent_bytes=1, limit=1, most=Usage(input=1, output=1))

    async def send() -> Reply:
        async with open_client(server.url, credentials, seconds) as client:
            return await ask(client, WHO, BODY, asked, "0")

    return asyncio.run(send())


@pytest.mark.parametrize(
    "fault", ["slow", "half a body", "less than a body", "billed and dropped", "504", "408", "425", "499"]
)
def test_what_was_billed_without_an_answer_counts_for_ever(server: Judge, files: list[Path], fault: str) -> None:
    server.idempotent, server.slow_seconds = False, 3
    server.faults = {0: fault, 3: fault, 9: fault}
    done = judge(server, files, *SILENT, "--timeout", "1")
    assert done.returncode == 0, done.stderr
    assert (len(server.bill), server.billed, len(replies(files))) == (PROMPTS + 3, PROMPTS + 3, PROMPTS)
    assert unanswered(files) == set(server.bill) - {reply.asked for reply in replies(files)}
    assert "for 3 requests without an answer or count, which may have been billed" in done.stdout
    assert printed(done.stdout) >= server.usd(PRICES)
    assert printed(judge(server, files, *SILENT).stdout) == printed(done.stdout)


@pytest.mark.parametrize("fault", ["429", "500", "503", "400"])
def test_what_the_server_says_has_failed_counts_as_nothing(server: Judge, files: list[Path], fault: str) -> None:
    server.faults = {0: fault}
    done = judge(server, files, *SILENT)
    assert done.returncode == 0, done.stderr
    assert not unanswered(files)
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def test_timeouts_do_not_spend_more_than_allowed(server: Judge, files: list[Path]) -> None:
    server.idempotent, server.every = False, "slow"
    done = judge(server, files, *SILENT, "--timeout", "0.2", "--max-usd", "4", "--concurrency", "64")
    assert done.returncode == 75, done.stderr
    assert 0 < server.usd(PRICES) <= printed(done.stdout) <= 4
    assert judge(server, files, *SILENT, "--timeout", "0.2", "--max-usd", "4").returncode == 1
    assert server.usd(PRICES) <= 4


def test_a_server_without_replies_is_asked_eight_times(server: Judge, files: list[Path]) -> None:
    server.idempotent, server.every = False, "billed and dropped"
    done = judge(server, files, "--concurrency", "64")
    assert done.returncode == 1
    assert server.billed == 8


def test_a_killed_session_counts_what_was_in_flight(server: Judge, files: list[Path]) -> None:
    server.idempotent, server.slow_seconds, server.faults = False, 600, {4: "slow", 5: "slow"}
    process = launch.start(ROOT / "evaluate.py", *command(server, files, *SILENT, "--concurrency", "2"))
    wait_until(lambda: server.billed == 6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(unanswered(files)) == 2
    done = judge(server, files, *SILENT)
    assert done.returncode == 0, done.stderr
    assert server.billed == PROMPTS + 2
    assert printed(done.stdout) >= server.usd(PRICES)


def test_one_request_goes_first_and_long_replies_end_at_the_limit(server: Judge, files: list[Path]) -> None:
    server.idempotent, server.every = False, "long"
    done = judge(server, files, *SILENT, "--max-usd", "6", "--concurrency", "64")
    assert server.billed <= 8
    assert {body["max_output_tokens"] for body in server.requests} == {680, 2 * 680}  # cut off: once more, with twice
    assert server.usd(PRICES) <= printed(done.stdout) <= 6


def test_requests_begin_one_at_a_time_and_are_halved_after_a_fault(
    server: Judge, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.retry_after = "0"
    in_flight: set[int] = set()
    at_once: list[int] = []  # how many were in flight when each came
    real, lock = server.fault_of, threading.Lock()

    def slow(key: str, body: dict[str, Any]) -> str | None:
        real(key, body)
        with lock:
            number = len(at_once)
            in_flight.add(number)
            at_once.append(len(in_flight))
        time.sleep(0.1)
        with lock:
            in_flight.remove(number)  # before it is answered
        return "429" if 8 <= number < 16 else None

    monkeypatch.setattr(server, "fault_of", slow)
    assert judge(server, files, *SILENT, "--concurrency", "4").returncode == 0
    assert [max(at_once[:count]) for count in (1, 3, 8)] == [1, 2, 4]
    assert at_once[16] == 1  # after eight faults
    assert max(at_once) == 4


def test_a_server_that_ignores_the_limit_is_noticed_by_its_first_reply(server: Judge, files: list[Path]) -> None:
    server.ignores_limit, server.every = True, "long"
    done = judge(server, files, *SILENT, "--max-usd", "30", "--concurrency", "64")
    assert "this server ignores the limit; what is sent from now on counts at the larger size" in done.stderr
    assert server.billed == 1  # of 20 dollars: another one could be as dear
    assert (done.returncode, printed(done.stdout)) == (75, pytest.approx(server.usd(PRICES), abs=1e-3))
    again = judge(server, files, *SILENT, "--max-usd", "30", "--concurrency", "64")
    assert again.returncode != 0
    assert server.billed == 1  # the next session knows it from the file


def test_what_replies_use_beyond_the_limit_does_not_compound(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "verdicts.jsonl")
    for id, most in (("a", 100), ("b", 1000)):  # the second was noted at ten times the limit already
        most_used = Usage(input=10, output=most)
        store.note_asked(Asked(id=id, key=id, judge="j", answers=1, sent_bytes=10, limit=100, most=most_used))
        usage = Usage(input=5, output=1000)
        store.add(Reply(key=id, id=None, text="", refusal=None, usage=usage, batch=False, asked=id))
    store.close()
    assert store.excess == VerdictStore(store.path).excess == {"j": 10.0}


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_wrong_counts_of_tokens_never_print_less_than_the_bill(server: Judge, files: list[Path], api: str) -> None:
    wrong = ["more cached than read", "no usage", "negative usage", "usage of zeros", "huge usage", "usage a list"]
    server.faults = dict(enumerate(wrong))
    done = judge(server, files, *SILENT, "--api", api)
    assert done.returncode == 0, done.stderr
    assert "for 5 requests without an answer or count" in done.stdout
    assert printed(done.stdout) >= server.usd(PRICES)


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_odd_replies_cost_no_other_ones(server: Judge, files: list[Path], api: str) -> None:
    server.faults = {0: "odd choices", 4: "error in 200", 5: "fenced", 6: "numbers in strings", 7: "halves"}
    done = judge(server, files, "--api", api)
    assert done.returncode == 0, done.stderr
    assert server.billed == len(replies(files)) == PROMPTS + 2
    assert "scripted overload" in [reply.error for reply in replies(files)]


@pytest.mark.parametrize("options", [(), ("--batch", "--poll-seconds", "0.05")], ids=str)
def test_a_reply_that_repeats_a_key_is_kept(server: Judge, files: list[Path], options: tuple[str, ...]) -> None:
    server.idempotent, server.faults = False, {0: "repeated key", 5: "repeated key"}
    done = judge(server, files, *options)
    assert done.returncode == 0, done.stderr
    assert server.billed == len(replies(files)) == PROMPTS


def test_no_request_waits_for_a_connection_while_its_time_runs(server: Judge) -> None:
    server.every, server.slow_seconds = "slow", 2  # two after each other are too long
    server.scorer = lambda asked: dict.fromkeys(asked["answers"], 1)
    asked = Asked(id="i", key="k", judge="j", answers=1, sent_bytes=1, limit=1, most=Usage(input=1, output=1))

    async def together() -> list[Reply]:
        async with open_client(server.url, None, 3.9, 104) as client:
            return await asyncio.gather(*(ask(client, WHO, BODY, asked, str(n)) for n in range(104)))

    assert len(asyncio.run(together())) == 104


def test_an_error_of_this_program_loses_no_reply_that_is_in_flight(
    server: Judge, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults, server.slow_seconds = {5: "slow", 6: "slow"}, 0.5

    seen: list[Reply] = []

    def broken(reply: Reply, answers: int) -> str | None:
        seen.append(reply)
        if len(seen) == 6:
            raise RuntimeError("a fault of ours")
        return problem_in(reply, answers)

    monkeypatch.setattr(asking, "problem_in", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        judge(server, files)
    assert not unanswered(files)
    assert len(replies(files)) == server.billed < PROMPTS


def test_odd_lines_of_a_batch_cost_no_other_ones(server: Judge, files: list[Path]) -> None:
    server.faults = dict(enumerate(ODD_LINES))
    batch = ("--batch", "--poll-seconds", "0.05")
    done = judge(server, files, *SILENT, *batch)
    assert done.returncode == 1
    assert "NOTE: batch batch_0: 2 lines cannot be read; 3 requests without a reply count at the most" in done.stderr
    assert "no readable line in the batch's output" in done.stderr
    assert len(replies(files)) == PROMPTS - 3 + 2  # a string and an object are wrong verdicts, asked once more
    assert printed(done.stdout) >= server.usd(PRICES)
    done = judge(server, files, *SILENT, *batch)
    assert done.returncode == 0, done.stderr
    assert server.billed == PROMPTS + 2 + 3
    assert printed(done.stdout) >= server.usd(PRICES)


@pytest.mark.parametrize("step", ["upload", "creation"])
def test_a_batch_that_is_out_does_not_use_up_the_limit_for_itself(server: Judge, files: list[Path], step: str) -> None:
    batch = (*SILENT, "--batch", "--poll-seconds", "0.05", "--max-usd", "7")
    server.path_faults = {"POST /v1/batches": "500"} if step == "upload" else {"GET /v1/files": "401"}
    assert judge(server, files, *batch).returncode == 1
    done = judge(server, files, *batch)
    assert done.returncode == 0, done.stderr
    assert server.billed == PROMPTS
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def test_a_batch_of_an_overlapping_judgement_leaves_the_limit_as_it_is(server: Judge, files: list[Path]) -> None:
    server.path_faults = {"GET /v1/files": "401"}
    assert judge(server, files, *SILENT, "--batch", "--poll-seconds", "0.05", "--orders", "2").returncode == 1
    done = judge(server, files, *SILENT, "--orders", "3", "--max-usd", "0.6")
    assert done.returncode == 75, done.stderr
    assert printed(done.stdout) <= 0.6


def test_a_batch_of_an_earlier_version_counts_when_it_is_fetched(server: Judge, files: list[Path]) -> None:
    server.path_faults = {"GET /v1/files": "401"}
    server.faults = dict.fromkeys(range(4), "500")
    assert judge(server, files, *SILENT, "--batch", "--poll-seconds", "0.05").returncode == 1
    store = files[0].parents[2] / "verdicts.jsonl"
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    for line in lines:
        line.get("batch", {}).pop("asked", None)
    store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    limit = server.usd(PRICES) + 0.5  # less than a request at its most
    done = judge(server, files, *SILENT, "--max-usd", str(limit))
    assert (done.returncode, server.billed) == (75, PROMPTS - 4), done.stderr
    assert server.usd(PRICES) <= printed(done.stdout) <= limit


def test_error_lines_that_a_batch_file_repeats_free_their_money_once(
    server: Judge, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults = dict.fromkeys(range(8), "500")
    run = server.run_batch

    def repeated(batch: dict[str, Any]) -> None:
        run(batch)
        name = batch["error_file_id"]
        server.files[name] = b"\n".join([server.files[name]] * 6)

    monkeypatch.setattr(server, "run_batch", repeated)
    done = judge(server, files, *SILENT, "--batch", "--poll-seconds", "0.05", "--orders", "2")
    assert done.returncode == 1
    store = files[0].parents[2] / "verdicts.jsonl"
    (unbilled,) = [line["unbilled"] for line in map(json.loads, store.read_text().splitlines()) if "unbilled" in line]
    assert len(unbilled) == len(set(unbilled)) == 8
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def other_batches(server: Judge) -> None:
    """Put batches of another program into the server's list."""
    for number in range(5):
        name = f"other_{number}"
        batch = {"id": name, "object": "batch", "created_at": 0, "status": "completed", "input_file_id": "other"}
        server.batches[name] = {**batch, "completion_window": "24h", "endpoint": "/v1/responses", "polls": 0}


def as_if_killed_before_its_id_was_noted(files: list[Path]) -> None:
    store = files[0].parents[2] / "verdicts.jsonl"
    lines = store.read_text().splitlines()
    store.write_text("".join(line + "\n" for line in lines if not json.loads(line).get("batch", {}).get("id")))


BATCH = ("--batch", "--poll-seconds", "0.05")


def test_a_batch_far_down_the_list_is_found(server: Judge, files: list[Path]) -> None:
    server.path_faults = {"GET /v1/batches/": "401"}
    assert judge(server, files, *SILENT, *BATCH).returncode == 1
    as_if_killed_before_its_id_was_noted(files)
    other_batches(server)
    server.page_of_batches = 2
    done = judge(server, files, *SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert (server.billed, len(server.batches)) == (PROMPTS, 1 + 5)


def test_a_batch_that_no_list_has_counts_at_its_most(server: Judge, files: list[Path]) -> None:
    server.path_faults, server.unlisted = {"POST /v1/batches": "lost"}, {"batch_0"}
    assert judge(server, files, *SILENT, *BATCH).returncode == 1
    server.run_batch(server.batches["batch_0"])
    done = judge(server, files, *SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert "lists no batch of file file-0; its 15 requests count at the most that they can cost" in done.stderr
    assert server.billed == 2 * PROMPTS
    assert printed(done.stdout) >= server.usd(PRICES)


def test_a_batch_that_another_project_has_is_not_given_up(server: Judge, files: list[Path]) -> None:
    server.path_faults = {"GET /v1/batches/": "404"}
    done = judge(server, files, *SILENT, *BATCH)
    assert done.returncode == 1
    assert "batch batch_0: the server does not know it; its 15 requests may be paid for: use the key" in done.stderr
    done = judge(server, files, *SILENT, *BATCH)
    assert done.returncode == 0, done.stderr
    assert (server.billed, list(server.batches)) == (PROMPTS, ["batch_0"])
    assert printed(done.stdout) == pytest.approx(server.usd(PRICES), abs=1e-4)


def test_refused_prompts_make_no_result_and_replace_no_complete_one(server: Judge, files: list[Path]) -> None:
    assert judge(server, files).returncode == 0
    complete = (files[0].parent.parent / "evaluations.jsonl").read_text()
    store = files[0].parents[2] / "verdicts.jsonl"
    store.unlink()
    server.prompts.clear()
    server.faults = dict.fromkeys(range(8, PROMPTS), "400")
    done = judge(server, files)
    assert done.returncode == 1
    assert "7 of 15 prompts (47%) have no verdict, wanted at most 10 %: the result is not kept" in done.stderr
    server.every = "400"
    done = judge(server, files, "--allow-left-out", "50")
    assert done.returncode == 0, done.stderr
    assert re.search(r"good: no result was added: that of \S+ leaves out 0 prompts, this one 7", done.stdout)
    assert (files[0].parent.parent / "evaluations.jsonl").read_text() == complete


def test_asking_wrong_ones_again_is_not_done_until_they_are_answered(server: Judge, files: list[Path]) -> None:
    server.idempotent, server.faults, server.wrong_again = False, {0: "prose"}, True
    assert judge(server, files, *SILENT).returncode == 0
    retry = (*SILENT, "--retry-wrong")
    done = judge(server, files, *retry, "--max-usd", str(server.usd(PRICES) + 0.3))
    assert done.returncode == 75, done.stderr
    assert "--max-usd: 1 verdicts are missing, and the next one may cost up to" in done.stdout
    server.every = "billed and dropped"
    done = judge(server, files, *retry)
    assert done.returncode == 1
    assert "1 verdicts are missing: " in done.stderr
    server.every = None
    done = judge(server, files, *retry)
    assert (done.returncode, result(files[0])["left_out"]) == (0, 1), done.stderr


def test_eight_wrong_verdicts_by_one_api_are_asked_again_by_the_other(server: Judge, files: list[Path]) -> None:
    server.every = "prose"
    done = judge(server, files)
    assert "--retry-wrong to ask once more, by another --api perhaps" in done.stderr
    server.every = None
    done = judge(server, files, "--retry-wrong", "--api", "chat")
    assert done.returncode == 0, done.stderr


def test_a_finished_judgement_adds_no_second_result(server: Judge, files: list[Path]) -> None:
    assert judge(server, files).returncode == 0
    again = judge(server, files)
    assert again.returncode == 0, again.stderr
    assert "good: no result was added: that of" in again.stdout
    assert len((files[0].parent.parent / "evaluations.jsonl").read_text().splitlines()) == 1


def test_the_judges_snapshot_and_comments_are_kept(server: Judge, files: list[Path]) -> None:
    server.snapshot = "scripted-2026-01-01"
    done = judge(server, files)
    assert "answered by: scripted-2026-01-01" in done.stdout
    assert result(files[0])["judge_snapshots"] == ["scripted-2026-01-01"]
    (comments,) = files[0].parent.glob("judged-by-scripted-????????.md")
    assert f"the judge's comments: {comments}" in done.stdout
    text = comments.read_text()
    assert text.count("- 95: follows the instruction closely") == PROMPTS
    assert "## 1. Instruction 0" in text
    assert "**poor**, seed 0\n\n> poor says to 0: 40\n\n- 40: follows" in text


def test_comments_are_written_whenever_there_are_some(server: Judge, files: list[Path]) -> None:
    server.faults = dict.fromkeys(range(8, PROMPTS), "400")
    done = judge(server, files)
    assert done.returncode == 1  # too few for a result
    (comments,) = files[0].parent.glob("judged-by-*.md")
    assert f"the judge's comments: {comments}" in done.stdout
    assert judge(server, files).returncode == 0
    comments.unlink()
    assert judge(server, files).returncode == 0
    assert comments.exists()
    assert judge(server, files, "--orders", "2", "--effort", "low").returncode == 0
    assert len(list(files[0].parent.glob("judged-by-*.md"))) == 2


def test_another_judgement_between_adds_no_second_result(server: Judge, files: list[Path]) -> None:
    results = files[0].parent.parent / "evaluations.jsonl"
    for effort in ("low", "none", "low", "none"):
        assert judge(server, files, "--effort", effort).returncode == 0
    complete = results.read_text()
    assert len(complete.splitlines()) == 2
    (files[0].parents[2] / "verdicts.jsonl").unlink()
    server.faults = {0: "400"}
    server.prompts.clear()
    done = judge(server, files, "--effort", "low")
    assert "leaves out 0 prompts, this one 1" in done.stdout
    assert results.read_text() == complete


def test_an_estimate_is_what_replies_of_the_same_judge_used(server: Judge, files: list[Path]) -> None:
    done = judge(server, files)
    spent = server.usd(PRICES)
    refused = judge(server, files, "--seed", "7", "--orders", "3", "--max-usd", "0.01")
    about = float(re.findall(r"about \$([\d.]+)", refused.stderr)[0])
    assert done.returncode == 0
    assert 0.8 * spent < about < 1.5 * spent


@pytest.mark.parametrize("fault", ["drip", "endless", "slow"])
def test_a_request_ends_after_its_time_or_its_size(server: Judge, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REPLY_BYTES", 10_000_000)
    server.every, server.slow_seconds = fault, 600
    server.scorer = lambda asked: dict.fromkeys(asked["answers"], 1)
    began = time.monotonic()
    with pytest.raises(NoReply, match="10,000,000 bytes" if fault == "endless" else "within 0.5 s") as found:
        asked_once(server, seconds=5 if fault == "endless" else 0.5)
    assert found.value.maybe_billed
    assert time.monotonic() - began < 3


def test_no_server_is_no_bill(server: Judge) -> None:
    async def nobody() -> Reply:
        client = open_client(server.url, None, 5)
        client.base_url = "http://127.0.0.1:1/v1"  # type: ignore[assignment]  # it has ended since
        asked = Asked(id="i", key="k", judge="j", answers=1, sent_bytes=1, limit=1, most=Usage(input=1, output=1))
        return await ask(client, WHO, BODY, asked, "0")

    with pytest.raises(NoReply) as found:
        asyncio.run(nobody())
    assert not found.value.maybe_billed


KEY = "sk-proj-/secret+key=0123"


def test_a_key_that_the_server_echoes_is_printed_and_stored_nowhere(server: Judge, files: list[Path]) -> None:
    server.every = "echo"
    done = launch.run(ROOT / "evaluate.py", *command(server, files), environment={"OPENAI_API_KEY": KEY})
    assert done.returncode == 1
    assert "401: wrong key: Bearer [secret]" in done.stderr
    written = [path.read_text(errors="replace") for path in files[0].parents[2].rglob("*") if path.is_file()]
    assert not any("secret+key" in text for text in [done.stdout, done.stderr, *written])


@pytest.mark.parametrize("echoed", [KEY, KEY.replace("/", "\\/"), KEY.replace("+", "\\u002B").replace("=", "\\u003d")])
def test_a_key_is_found_in_any_spelling_of_json(server: Judge, monkeypatch: pytest.MonkeyPatch, echoed: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.content = ('{"id": "%s", "error": {"message": "no: %s"}}' % (echoed, echoed)).encode()  # noqa: UP031
    reply = asked_once(server)
    assert (reply.id, reply.error) == ("[secret]", "no: [secret]")


def test_a_password_of_a_url_is_sent_and_kept_nowhere(server: Judge, files: list[Path]) -> None:
    url = server.url.replace("http://", "http://me:secret%20word@")
    done = judge(server, files, "--base-url", url)
    assert done.returncode == 0, done.stderr
    assert server.authorizations == {"Basic bWU6c2VjcmV0IHdvcmQ="}
    written = [path.read_text(errors="replace") for path in files[0].parents[2].rglob("*") if path.is_file()]
    assert not any("secret" in text or "bWU6" in text for text in [done.stdout, done.stderr, *written])
    assert json.loads((files[0].parent.parent / "evaluations.jsonl").read_text())["base_url"] == server.url
    assert split_credentials("https://me:a%40b@host:8/v1") == ("https://host:8/v1", ("me", "a@b"))


@pytest.mark.parametrize("key", ["sk-proj-secr\x01et0123", "sk-proj-secr\u00e9t0123", "sk-proj-secret 0123"])
def test_a_key_that_is_none_is_not_quoted(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(BadInput) as found:
        find_key("https://far.example/v1")
    assert "sk-proj" not in str(found.value)
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\r\n")
    assert find_key("https://far.example/v1") == KEY


@pytest.mark.parametrize("password", ["secret/pw12345", "12345/secret", "secret#pw", "secret?pw", "[secret", "a@/b"])
def test_a_password_that_is_not_encoded_is_not_quoted(server: Judge, files: list[Path], password: str) -> None:
    done = judge(server, files, "--base-url", f"https://me:{password}@127.0.0.1:1/v1")
    assert done.returncode == 1
    assert "percent-encode such characters" in done.stderr
    assert password[:5] not in done.stdout + done.stderr.replace("it is not shown", "")


@pytest.mark.parametrize("login", ["hf_token/0123", "hf_token/0123:x"])
def test_a_token_as_user_name_is_a_secret(server: Judge, login: str) -> None:
    server.content = b'{"id": "hf_token/0123", "error": {"message": "no: hf_token/0123"}}'
    user, _, password = login.partition(":")
    reply = asked_once(server, credentials=(user, password))
    assert (reply.id, reply.error) == ("[secret]", "no: [secret]")


def test_what_an_exception_says_holds_no_secret(server: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise transport.httpx2.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(transport.BoundedClient, "_whole", fails)
    with pytest.raises(NoReply, match=r"Bearer \[secret\]") as found:
        asked_once(server)
    assert not found.value.maybe_billed


def test_a_folder_of_files_in_the_address_is_no_file(server: Judge) -> None:
    server.url = server.url.replace("/v1", "/files/v1")
    server.every, server.slow_seconds = "slow", 600
    began = time.monotonic()
    with pytest.raises(NoReply, match=r"within 0\.3 s"):
        asked_once(server, seconds=0.3)
    assert time.monotonic() - began < 3


def test_redirects_are_not_followed(server: Judge, files: list[Path]) -> None:
    server.every, server.redirect_to = "redirect", server.url.replace("127.0.0.1", "localhost") + "/responses"
    done = judge(server, files)
    assert (done.returncode, len(server.requests)) == (1, 1)
    assert f"{server.url}: 307: it redirects, which is not followed; pass the final address" in done.stderr


def test_a_key_crosses_no_network_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for url in ("http://localhost:1/v1", "http://127.0.0.2/v1", "http://[::1]/v1", "https://far.example/v1"):
        assert find_key(url) == KEY
    with pytest.raises(BadInput, match="OPENAI_API_KEY would cross the network unencrypted; use https://"):
        find_key("http://192.168.1.5:8000/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert find_key("http://192.168.1.5:8000/v1") == "EMPTY"  # no secret
    with pytest.raises(BadInput, match="the password would cross the network unencrypted"):
        find_key("http://far.example/v1", ("me", "secret"))


def test_verdicts_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "VERDICTS", tmp_path / "repository" / "runs" / "verdicts.jsonl")
    monkeypatch.chdir(tmp_path)
    assert command_module._default_store() == tmp_path / "repository" / "runs" / "verdicts.jsonl"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "verdicts.jsonl").write_text("")
    with pytest.raises(BadInput, match=r"runs/verdicts.jsonl: holds verdicts, and so may .*; pass the one to use"):
        command_module._default_store()


@pytest.mark.parametrize("usage", [None, {"cached_input": 10**7}, {"output": -5}, {"input": 10**30}])
def test_a_file_of_an_earlier_version_is_read_as_before(
    server: Judge, files: list[Path], usage: dict[str, int] | None
) -> None:
    assert judge(server, files).returncode == 0
    store = files[0].parents[2] / "verdicts.jsonl"
    old = [json.loads(line) for line in store.read_text().splitlines()]
    old = [line for line in old if "reply" in line]
    for line in old:
        for key in ("asked", "model", "error", "cut"):
            del line["reply"][key]
    old[0]["reply"]["usage"] = None if usage is None else {**old[0]["reply"]["usage"], **usage}
    store.write_text("".join(json.dumps(line) + "\n" for line in old))
    again = judge(server, files)
    assert f"0 requests, {PROMPTS} already answered" in again.stdout
    assert "for 1 requests without an answer or count" in again.stdout
    assert printed(again.stdout) >= server.usd(PRICES)
