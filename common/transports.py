"""Limits on an httpx client: its own timeouts hold for each read alone, so that a server that drips bytes has no limit.

The client's transports, those of proxies included, are wrapped; importing this needs no httpx.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

READ_SECONDS = 120.0  # without a byte, and until the speed of a reply counts
SLOWEST_BYTES = 1000  # per second, on average over a reply
UNSIZED_BYTES = 1 << 26  # most of a reply whose length is not announced, or that is read at once as JSON
MOST_PACKED = 64  # such a reply that is gzipped may have this many times fewer bytes: a thousandth may unpack to it


def wrap_transports(client: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace each transport of an httpx client, in place."""
    client._transport = wrap(client._transport)
    client._mounts = {
        pattern: None if transport is None else wrap(transport) for pattern, transport in client._mounts.items()
    }


def bounded(client: Any) -> Any:
    """Return a client that may transfer files of any size, and ends a reply that is too slow or has no end."""
    import httpx2

    class Stream(httpx2.SyncByteStream):
        def __init__(self, response: httpx2.Response, request: httpx2.Request):
            self._stream: Any = response.stream
            self._request = request
            packed = response.headers.get("content-encoding", "identity") != "identity"
            is_json = "json" in response.headers.get("content-type", "")
            announced = "content-length" in response.headers and not is_json and not packed
            self._most_bytes = float("inf") if announced else UNSIZED_BYTES / (MOST_PACKED if packed else 1)

        def __iter__(self) -> Iterator[bytes]:
            began, received = time.monotonic(), 0
            for part in self._stream:
                received += len(part)
                seconds = time.monotonic() - began
                if seconds > READ_SECONDS and received < seconds * SLOWEST_BYTES:
                    raise httpx2.ReadTimeout(f"got {received:,} bytes in {seconds:.0f} s", request=self._request)
                if received > self._most_bytes:
                    raise httpx2.ReadError(
                        f"the reply has more than {self._most_bytes:,.0f} bytes", request=self._request
                    )
                yield part

        def close(self) -> None:
            self._stream.close()

    class Transport(httpx2.BaseTransport):
        def __init__(self, transport: httpx2.BaseTransport):
            self._transport = transport

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            given = request.extensions.get("timeout") or {}
            limits = {name: given.get(name) or READ_SECONDS for name in ("connect", "read", "write", "pool")}
            request.extensions = {**request.extensions, "timeout": limits}
            response = self._transport.handle_request(request)
            response.stream = Stream(response, request)
            return response

        def close(self) -> None:
            self._transport.close()

    wrap_transports(client, Transport)
    return client
