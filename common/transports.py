"""Limits on an httpx client: its own timeouts hold for each read alone, so that a server that drips bytes has no limit.

The client's transports, those of proxies included, are wrapped, and so are their connections: whatever a server drips,
be it a body, headers or the frames of chunks, it arrives through these. Importing this needs no httpx.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

READ_SECONDS = 120.0  # without a byte, until all headers are there, and until the speed of a transfer counts
SLOWEST_BYTES = 1000  # per second, on average over a reply
WRITTEN_BYTES = 1 << 16  # at once
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

    waiting = threading.local()  # `headers`: this thread waits for the headers of a reply

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
            waiting.headers = True
            try:
                response = self._transport.handle_request(request)
            finally:
                waiting.headers = False
            response.stream = Stream(response, request)
            return response

        def close(self) -> None:
            self._transport.close()

    def wrap(transport: Any) -> Any:
        pool = getattr(transport, "_pool", None)
        if pool is not None:
            pool._network_backend = _paced(pool._network_backend, waiting)
        return Transport(transport)

    wrap_transports(client, wrap)
    return client


def _paced(backend: Any, waiting: threading.local) -> Any:
    """Return a network backend of httpcore whose connections end a transfer that is too slow.

    A connection sends a request, and then reads the reply. Each of the two phases has READ_SECONDS, and more for the
    bytes that it has moved, at SLOWEST_BYTES a second. Headers have no more than READ_SECONDS, however many they are.
    """
    import httpcore2

    class PacedConnection(httpcore2.NetworkStream):
        def __init__(self, stream: Any):
            self._stream = stream
            self._phase = ""
            self._began = self._seconds = 0.0  # of the phase; seconds without those in which nobody reads
            self._bytes = 0

        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            data: bytes = self._timed(
                "read", httpcore2.ReadTimeout, timeout, lambda left: self._stream.read(max_bytes, left)
            )
            self._bytes += len(data)
            return data

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            for at in range(0, len(buffer), WRITTEN_BYTES):  # the limit of one write holds for each of its parts
                part = buffer[at : at + WRITTEN_BYTES]
                self._timed("written", httpcore2.WriteTimeout, timeout, partial(self._stream.write, part))
                self._bytes += len(part)

        def close(self) -> None:
            self._stream.close()

        def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> Any:
            return PacedConnection(self._stream.start_tls(ssl_context, server_hostname, timeout))

        def get_extra_info(self, info: str) -> Any:
            return self._stream.get_extra_info(info)

        def _timed(self, phase: str, late: type[Exception], timeout: float | None, move: Callable[[float], Any]) -> Any:
            """Return what `move` does in the seconds that are left to it. Raises `late` after these."""
            if phase != self._phase:
                self._phase, self._began, self._seconds, self._bytes = phase, time.monotonic(), 0.0, 0
            is_head = phase == "read" and getattr(waiting, "headers", False)
            began = time.monotonic()
            spent = began - self._began if is_head else self._seconds
            left = READ_SECONDS + (0 if is_head else self._bytes / SLOWEST_BYTES) - spent
            try:
                if left <= 0:
                    raise late
                return move(min(timeout or READ_SECONDS, left))
            except late as error:
                seconds = spent + time.monotonic() - began
                where = " and no end of the headers" * is_head
                raise late(f"{self._bytes:,} bytes {phase} in {seconds:.0f} s{where}") from error
            finally:
                self._seconds += time.monotonic() - began

    class PacedBackend(httpcore2.NetworkBackend):
        def connect_tcp(self, *arguments: Any, **options: Any) -> Any:
            return PacedConnection(backend.connect_tcp(*arguments, **options))

        def connect_unix_socket(self, *arguments: Any, **options: Any) -> Any:
            return PacedConnection(backend.connect_unix_socket(*arguments, **options))

        def sleep(self, seconds: float) -> None:
            backend.sleep(seconds)

    return PacedBackend()
