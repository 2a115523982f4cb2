"""The HTTP client: requests end, and secrets leak nowhere."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.judging import client as client_module
from evaluation.judging.address import find_key, split_credentials
from evaluation.judging.client import open_client, send
from evaluation.judging.replies import Failure, NoReply
from evaluation.judging.store import Asked, Reply, Usage
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import Sessions
from tests.judge_server import Judge

KEY = "sk-proj-/secret+key=0123"
ASKED = Asked(id="i", key="k", judge="j", answers=1, sent_bytes=1, limit=1, most=Usage(input=1, output=1))
BODY = {"model": "m", "input": '{"answers": {"A": "1"}}', "max_output_tokens": 99}


def asked_once(server: Judge, seconds: float = 5.0, credentials: tuple[str, str] | None = None) -> Reply | NoReply:
    """Send one request, in this process."""

    async def once() -> Reply | NoReply:
        async with open_client(server.url, credentials, seconds) as client:
            return await send(client, "responses", BODY, ASKED, "0")

    return asyncio.run(once())


def test_no_request_waits_for_a_connection_while_its_time_runs(server: Judge) -> None:
    arrived = threading.Barrier(104)  # the server answers none before it has all

    def scorer(asked: Any) -> dict[str, int]:
        arrived.wait(60)
        return dict.fromkeys(asked["answers"], 1)

    server.scorer = scorer

    async def together() -> list[Reply | NoReply]:
        async with open_client(server.url, None, 60, 104) as client:
            return await asyncio.gather(*(send(client, "responses", BODY, ASKED, str(n)) for n in range(104)))

    assert sum(isinstance(outcome, Reply) for outcome in asyncio.run(together())) == 104


@pytest.mark.parametrize("fault", ["drip", "endless", "slow"])
def test_a_request_ends_after_its_time_or_its_size(server: Judge, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REPLY_BYTES", 10_000_000)
    server.every, server.slow_seconds = fault, 600
    server.scorer = lambda asked: dict.fromkeys(asked["answers"], 1)
    began = time.monotonic()
    lost = asked_once(server, seconds=5 if fault == "endless" else 0.5)
    assert isinstance(lost, NoReply) and lost.failure is Failure.LOST
    assert ("10,000,000 bytes" if fault == "endless" else "within 0.5 s") in lost.why
    assert time.monotonic() - began < 60  # of 600


def test_no_server_is_no_bill(server: Judge) -> None:
    async def nobody() -> Reply | NoReply:
        client = open_client(server.url, None, 5)
        client.base_url = "http://127.0.0.1:1/v1"  # type: ignore[assignment]  # it has ended since
        return await send(client, "responses", BODY, ASKED, "0")

    failed = asyncio.run(nobody())
    assert isinstance(failed, NoReply) and failed.failure is Failure.FAILED


def test_a_key_that_the_server_echoes_is_printed_and_stored_nowhere(server: Judge, sessions: Sessions) -> None:
    server.every = "echo"
    done = launch.run(ROOT / "evaluate.py", *sessions.command(), environment={"OPENAI_API_KEY": KEY})
    assert done.returncode == 1
    assert "401: wrong key: Bearer [secret]" in done.stderr
    written = sessions.written()
    assert not any("secret+key" in text for text in [done.stdout, done.stderr, *written])


@pytest.mark.parametrize("echoed", [KEY, KEY.replace("/", "\\/"), KEY.replace("+", "\\u002B").replace("=", "\\u003d")])
def test_a_key_is_found_in_any_spelling_of_json(server: Judge, monkeypatch: pytest.MonkeyPatch, echoed: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.content = ('{"id": "%s", "error": {"message": "no: %s"}}' % (echoed, echoed)).encode()  # noqa: UP031
    reply = asked_once(server)
    assert isinstance(reply, Reply)
    assert (reply.id, reply.error) == ("[secret]", "no: [secret]")


def test_a_password_of_a_url_is_sent_and_kept_nowhere(server: Judge, sessions: Sessions) -> None:
    url = server.url.replace("http://", "http://me:secret%20word@")
    done = sessions.run("--base-url", url)
    assert done.returncode == 0, done.stderr
    assert server.authorizations == {"Basic bWU6c2VjcmV0IHdvcmQ="}
    written = sessions.written()
    assert not any("secret" in text or "bWU6" in text for text in [done.stdout, done.stderr, *written])
    assert json.loads(sessions.results.read_text())["base_url"] == server.url
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
def test_a_password_that_is_not_encoded_is_not_quoted(server: Judge, sessions: Sessions, password: str) -> None:
    done = sessions.run("--base-url", f"https://me:{password}@127.0.0.1:1/v1")
    assert done.returncode == 1
    assert "percent-encode such characters" in done.stderr
    assert password[:5] not in done.stdout + done.stderr.replace("it is not shown", "")


@pytest.mark.parametrize("login", ["hf_token/0123", "hf_token/0123:x"])
def test_a_token_as_user_name_is_a_secret(server: Judge, login: str) -> None:
    server.content = b'{"id": "hf_token/0123", "error": {"message": "no: hf_token/0123"}}'
    user, _, password = login.partition(":")
    reply = asked_once(server, credentials=(user, password))
    assert isinstance(reply, Reply)
    assert (reply.id, reply.error) == ("[secret]", "no: [secret]")


def test_what_an_exception_says_holds_no_secret(server: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise client_module.httpx2.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(client_module.BoundedClient, "_whole", fails)
    failed = asked_once(server)
    assert isinstance(failed, NoReply) and failed.failure is Failure.FAILED
    assert "Bearer [secret]" in failed.why


def test_a_folder_of_files_in_the_address_is_no_file(server: Judge) -> None:
    server.url = server.url.replace("/v1", "/files/v1")
    server.every, server.slow_seconds = "slow", 600
    began = time.monotonic()
    lost = asked_once(server, seconds=0.3)
    assert isinstance(lost, NoReply) and "within 0.3 s" in lost.why
    assert time.monotonic() - began < 60  # of 600


def test_redirects_are_not_followed(server: Judge, sessions: Sessions) -> None:
    server.every, server.redirect_to = "redirect", server.url.replace("127.0.0.1", "localhost") + "/responses"
    done = sessions.run()
    assert (done.returncode, len(server.requests)) == (1, 1)
    assert f"{server.url}: 307: redirects are not followed; pass the final address" in done.stderr


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


def test_retry_after_is_seconds_or_a_date_and_two_minutes_at_most() -> None:
    told = {"2.5": 2.5, "3600": 120, "Mon, 01 Jan 2001 00:00:00 GMT": 0, "": None, "soon": None, "nan": None}
    assert {value: client_module._retry_after(value) for value in told} == told
