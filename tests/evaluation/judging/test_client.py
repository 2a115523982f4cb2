"""The judge's client: every request ends, whatever the server does, and a request that was not sent is not billed."""

import asyncio
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from evaluation.judging import client as client_module
from evaluation.judging.client import BoundedTransport, EndlessReply, RequestSlots, read_reply
from evaluation.judging.store import JudgeRequest, Usage
from tests import endless_server as endless
from tests.endless_server import Misbehaviour
from tests.evaluation.judging.sessions import SILENT, Sessions
from tests.judge_server import Judge


async def ask(url: str, seconds: float) -> httpx2.Response:
    transport = BoundedTransport(httpx2.AsyncHTTPTransport(), seconds)
    async with httpx2.AsyncClient(transport=transport, timeout=60) as client:
        return await client.post(url, json={})


@pytest.mark.parametrize("misbehaviour", [endless.dripped_headers, endless.dripped_body, endless.dripped_chunks])
def test_request_time_is_limited(misbehaviour: Misbehaviour) -> None:
    with (
        endless.serve(misbehaviour) as url,
        pytest.raises(httpx2.ReadTimeout, match=r"no complete reply within 0\.3 s"),
    ):
        asyncio.run(ask(url, 0.3))


@pytest.mark.parametrize("misbehaviour", [endless.chunks, endless.large_body, endless.gzip_bomb])
def test_reply_size_is_limited(misbehaviour: Misbehaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_REPLY_BYTES", 1_000_000)
    with (
        endless.serve(misbehaviour) as url,
        pytest.raises(EndlessReply, match="the reply has more than 1,000,000 bytes"),
    ):
        asyncio.run(ask(url, 60))


def test_session_ends_although_the_server_drips(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRIES", 0)
    with endless.serve(endless.dripped_body) as url:
        done = sessions.run(*SILENT, "--base-url", f"{url}/v1", "--timeout", "0.2", "--concurrency", "8")
    assert done.returncode == 1 and "no complete reply within 0.2 seconds" in done.stderr
    assert "which may have been billed" in done.stdout  # the requests were sent


def test_only_requests_that_were_sent_count(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[set[str]] = []

    async def send(url: str) -> None:
        transport = BoundedTransport(httpx2.AsyncHTTPTransport(), 2)
        async with httpx2.AsyncClient(transport=transport) as client:
            with suppress(httpx2.HTTPError):
                await client.post(url, headers={"X-Client-Request-Id": "a"})
        sent.append(transport.sent)

    with endless.serve(endless.redirects) as url:
        for address in (url, "http://127.0.0.1:1", "http://host.invalid", "https://127.0.0.1:1"):
            asyncio.run(send(address))
    assert sent == [{"a"}, set(), set(), set()]


def test_failure_halves_the_concurrency() -> None:
    async def occupied(slots: RequestSlots, entered: list[int], done: asyncio.Event) -> None:
        async with slots:
            entered.append(slots.allowed)
            await done.wait()

    async def begin(slots: RequestSlots, entered: list[int], count: int) -> list[asyncio.Event]:
        ends = [asyncio.Event() for _ in range(count)]
        tasks.extend(asyncio.create_task(occupied(slots, entered, end)) for end in ends)
        await asyncio.sleep(0)
        return ends

    async def fail_and_recover() -> None:
        slots, entered = RequestSlots(5), list[int]()
        for _ in range(9):
            slots.widen()
        ends = await begin(slots, entered, 6)
        assert (slots.allowed, len(entered)) == (5, 5)  # never more than --concurrency
        slots.halve()
        for number, allowed_in in ((0, 5), (1, 5), (2, 5), (3, 6)):
            ends[number].set()
            for _ in range(3):
                await asyncio.sleep(0)
            # The next request begins when only one request is running.
            assert (slots.allowed, len(entered)) == (2, allowed_in), number
        for _ in range(9):
            slots.halve()
        slots.widen()
        assert slots.allowed == 2
        for end in ends:
            end.set()
        await asyncio.gather(*tasks)
        await begin(slots, entered, 3)
        assert len(entered) == 6 + 2
        for task in tasks:
            task.cancel()

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(fail_and_recover())


def test_only_retried_failures_halve_the_concurrency(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved: list[int] = []

    def halve(slots: RequestSlots) -> None:
        plain(slots)
        halved.append(slots.allowed)

    plain = RequestSlots.halve
    monkeypatch.setattr(RequestSlots, "halve", halve)
    server.faults, server.retry_after = {4: "429", 6: "500", 8: "dropped", 9: "400"}, "0.001"
    sessions.said("--concurrency", "4", "--allow-left-out", "20")
    assert len(halved) == 3 and max(halved) <= 2  # a rejected prompt does not lower the limit


BODIES: list[Any] = [
    {},
    {"output": [3]},
    {"choices": []},
    {"choices": 7},
    {"choices": {"0": {}}},
    {"choices": [[]]},
    {"choices": [{"message": None}], "usage": {}},
    {"choices": [{"message": {"content": {"text": 1}}}]},
    {"id": [1], "model": {}, "usage": [1], "error": []},
]
IMPOSSIBLE_COUNTS: list[Any] = [
    {"prompt_tokens": -9, "completion_tokens": 5},
    {"prompt_tokens": 9, "completion_tokens": 10**30},
    {"prompt_tokens": 0, "completion_tokens": 0},
    {"prompt_tokens": True},
    {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 90}},
    {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": -90}},
    {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": [1]},
    [1, 2],
    "many",
]


def test_malformed_replies_are_invalid_verdicts() -> None:
    request = JudgeRequest(id="a", key="k", limit=680, most=Usage(input=1, output=1))
    for body in BODIES:
        reply = read_reply(request, body)
        assert (reply.text, reply.refusal, reply.usage) == ("", None, None), body
        assert reply.problem(3) is not None, body
    for usage in IMPOSSIBLE_COUNTS:  # such a request is charged at its maximum
        assert read_reply(request, {"choices": [], "usage": usage}).usage is None, usage
    problem = read_reply(request, {"error": {"message": "overloaded \x1b[2J, try later"}}).problem(3)
    assert problem is not None and "overloaded" in problem and "\x1b" not in problem


def test_only_strings_become_reply_text() -> None:
    request = JudgeRequest(id="a", key="k", limit=5, most=Usage(input=1, output=1))
    message: dict[str, Any] = {"content": "a verdict", "refusal": None}
    body = {"id": "r", "model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    assert read_reply(request, body | {"usage": usage}).usage == Usage(input=5, output=2)

    absent = read_reply(request, body | {"id": None, "model": None})
    assert (absent.id, absent.model, absent.text, absent.error) == (None, None, "a verdict", None)
    for content in (5, False, {"text": "x"}, [{"type": "image"}]):
        choice = {"message": {"content": content}, "finish_reason": "stop"}
        refused = read_reply(request, body | {"choices": [choice]})
        assert refused.text == "" and "content: got" in str(refused.error), content
    parts = {"message": {"content": [{"type": "text", "text": "a verdict"}]}}
    assert read_reply(request, body | {"choices": [parts]}).text == "a verdict"
    for wrong in ({"id": 5}, {"model": ["m"]}, {"choices": [{"message": message, "finish_reason": 3}]}):
        assert "wanted a string" in str(read_reply(request, body | wrong).error), wrong
    choices = [{"message": message | {"refusal": True}, "finish_reason": "stop"}]
    assert "refusal: got True" in str(read_reply(request, body | {"choices": choices}).error)
    assert read_reply(request, body | {"usage": usage | {"prompt_tokens": True}}).usage is None


def test_malformed_reply_error_describes_its_form() -> None:
    request = JudgeRequest(id="a", key="k", limit=5, most=Usage(input=1, output=1))
    no_list: list[Any] = [[], {}, "x", None, {"a": 1}]
    for choices, problem in (
        *(
            (wrong_choices, f"choices: got {wrong_choices!r}, wanted a list that is not empty")
            for wrong_choices in no_list
        ),
        (["x"], "wanted an object with choices and a message"),
        ([{}], "'message' is missing"),
        ([{"message": {}}], "'content' is missing"),
        ([{"message": []}], "wanted an object with choices and a message"),
    ):
        assert read_reply(request, {"choices": choices}).error == f"not a chat completion: {problem}", choices


def test_refusal_needs_no_content() -> None:
    request = JudgeRequest(id="a", key="k", limit=5, most=Usage(input=1, output=1))
    for choice, refusal in (
        ({"message": {"refusal": "I will not judge this."}}, "I will not judge this."),
        ({"message": {"refusal": None}, "finish_reason": "content_filter"}, "content filter"),
    ):
        reply = read_reply(request, {"choices": [choice]})
        assert (reply.refusal, reply.text, reply.error) == (refusal, "", None)


def test_retry_after_may_be_a_date() -> None:
    past, now, far = "Mon, 01 Jan 2001 00:00:00 GMT", datetime.now(timezone.utc), "Fri, 01 Jan 2100 00:00:00 GMT"
    for header, least, most in (
        (past, 0, 0),
        (format_datetime(now + timedelta(seconds=30), usegmt=True), 1, 30),
        (far, 60, 60),
        ("Mon, 01 Jan 2001", 0, 0),
        ("Mon, 99 Jan 2001 00:00:00 GMT", 0, 0),
        ("nan", 0, 0),
        ("", 0, 0),
    ):
        pause = client_module._asked_pause(httpx2.Response(429, headers={"Retry-After": header}))
        assert least <= pause <= most, header
