"""Slow and endless replies of the hub are stopped. A file of any size arrives if its size was announced."""

import socket
from pathlib import Path

import httpx2
import pytest

from common import transports
from common.transports import bounded
from tests import endless_server as endless
from tests.endless_server import Misbehaviour
from tests.loopback import serve_files


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "READ_SECONDS", 0.3)
    monkeypatch.setattr(transports, "UNSIZED_BYTES", 200_000)


@pytest.mark.parametrize(
    "misbehaviour",
    [endless.dripped_body, endless.dripped_chunks, endless.chunks, endless.large_body, endless.gzip_bomb],
)
def test_endless_replies_of_the_hub_are_stopped(misbehaviour: Misbehaviour) -> None:
    with (
        endless.serve(misbehaviour) as url,
        bounded(httpx2.Client(timeout=None)) as client,
        pytest.raises((httpx2.ReadTimeout, httpx2.ReadError), match="bytes"),
    ):
        client.get(url)


@pytest.mark.parametrize(
    "misbehaviour", [endless.dripped_headers, endless.endless_interim_replies, endless.dripped_chunk_frame]
)
def test_a_request_to_the_hub_has_one_deadline(misbehaviour: Misbehaviour) -> None:
    with endless.serve(misbehaviour) as url, bounded(httpx2.Client(timeout=None)) as client:
        for _ in range(2):  # the client can be used again
            with pytest.raises(httpx2.ReadTimeout, match=r"[\d,]+ bytes read in \d s"):
                client.get(url)


def test_an_upload_without_a_reader_is_stopped() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        bounded(httpx2.Client(timeout=None)) as client,
        pytest.raises(httpx2.WriteTimeout, match=r"[\d,]+ bytes written in 0 s"),
    ):
        client.post(f"http://127.0.0.1:{server.getsockname()[1]}", content=bytes(50_000_000))


def test_a_large_file_of_announced_size_arrives(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1_000_000))
    with serve_files(tmp_path) as server, bounded(httpx2.Client(timeout=None)) as client:
        assert client.get(f"{server.url}/a.safetensors").content == bytes(1_000_000)


def test_the_hub_client_uses_our_transports() -> None:
    from huggingface_hub.utils import get_session

    from common.hub_client import hub_errors

    with hub_errors("x"):
        assert type(get_session()._transport).__module__ == "common.transports"
