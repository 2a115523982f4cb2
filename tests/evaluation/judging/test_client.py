"""The judge's client: a request ends whatever its server does, and what was not sent is not billed."""

import asyncio
from contextlib import suppress

import httpx2
import pytest

from evaluation.judging import client as client_module
from evaluation.judging.client import BoundedTransport, EndlessReply
from tests import endless_server as endless
from tests.endless_server import Misbehaviour
from tests.evaluation.judging.sessions import SILENT, Sessions


async def ask(url: str, seconds: float) -> httpx2.Response:
    transport = BoundedTransport(httpx2.AsyncHTTPTransport(), seconds)
    async with httpx2.AsyncClient(transport=transport, timeout=60) as client:
        return await client.post(url, json={})


@pytest.mark.parametrize("misbehaviour", [endless.dripped_headers, endless.dripped_body, endless.dripped_chunks])
def test_a_request_ends_after_its_time(misbehaviour: Misbehaviour) -> None:
    with endless.serve(misbehaviour) as url, pytest.raises(httpx2.ReadTimeout, match=r"no whole reply within 0\.3 s"):
        asyncio.run(ask(url, 0.3))


@pytest.mark.parametrize("misbehaviour", [endless.chunks, endless.large_body, endless.gzip_bomb])
def test_a_request_ends_after_its_size(misbehaviour: Misbehaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_REPLY_BYTES", 1_000_000)
    with (
        endless.serve(misbehaviour) as url,
        pytest.raises(EndlessReply, match="the reply has more than 1,000,000 bytes"),
    ):
        asyncio.run(ask(url, 60))


def test_a_session_ends_whatever_its_server_drips(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRIES", 0)
    with endless.serve(endless.dripped_body) as url:
        done = sessions.run(*SILENT, "--base-url", f"{url}/v1", "--timeout", "0.2", "--concurrency", "8")
    assert done.returncode == 1 and "no whole reply within 0.2 seconds" in done.stderr
    assert "which may have been billed" in done.stdout  # they were sent


def test_only_what_leaves_this_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
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
