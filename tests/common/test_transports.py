"""Replies of the hub end, however slowly or endlessly its server sends them; files of any announced size arrive."""

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
def test_a_reply_of_the_hub_ends(misbehaviour: Misbehaviour) -> None:
    with (
        endless.serve(misbehaviour) as url,
        bounded(httpx2.Client(timeout=None)) as client,
        pytest.raises((httpx2.ReadTimeout, httpx2.ReadError), match="bytes"),
    ):
        client.get(url)


def test_a_large_file_of_announced_size_arrives(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1_000_000))
    with serve_files(tmp_path) as server, bounded(httpx2.Client(timeout=None)) as client:
        assert client.get(f"{server.url}/a.safetensors").content == bytes(1_000_000)


def test_the_hubs_client_has_these_limits() -> None:
    from huggingface_hub.utils import get_session

    from common.hub_client import hub_errors

    with hub_errors("x"):
        assert type(get_session()._transport).__module__ == "common.transports"
