"""Time limits for an httpx client: a transfer that is too slow is stopped.

httpx's own timeouts apply only to single reads, so a server that sends a few bytes at a time could keep a transfer
running forever. Therefore the client's transports, including those for proxies, and their connections are wrapped: all
bytes of a server's bodies, headers and chunk frames pass through the wrappers. This module can be imported without
httpx.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

# Longest time without a byte, and longest time until all headers have arrived. The speed of a transfer is checked only
# after this time.
READ_SECONDS = 120.0
SLOWEST_BYTES = 1000  # minimum speed in bytes per second, averaged over a reply
WRITTEN_BYTES = 1 << 16  # maximum number of bytes in a single write
UNSIZED_BYTES = 1 << 26  # limit for a reply of unannounced length, and for JSON, which is read completely
# A compressed reply may have only UNSIZED_BYTES / MOST_PACKED bytes, because gzip can shrink data to a thousandth.
MOST_PACKED = 64


def wrap_transports(client: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace each transport of an httpx client, in place, with what `wrap` returns for it."""
    client._transport = wrap(client._transport)
    client._mounts = {
        pattern: None if transport is None else wrap(transport) for pattern, transport in client._mounts.items()
    }


def bounded(client: Any) -> Any:
    """Limit an httpx client: it can transfer files of any size, but it stops a reply that is too slow or endless."""
    import httpx2

    waiting = threading.local()  # `waiting.headers` is true while this thread waits for the headers of a reply

    class Stream(httpx2.SyncByteStream):
        def __init__(self, response: httpx2.Response, request: httpx2.Request):
            self._stream: Any = response.stream
            self._request = request
            is_packed = response.headers.get("content-encoding", "identity") != "identity"
            is_json = "json" in response.headers.get("content-type", "")
            is_sized = "content-length" in response.headers and not is_json and not is_packed
            self._most_bytes = float("inf") if is_sized else UNSIZED_BYTES / (MOST_PACKED if is_packed else 1)

        def __iter__(self) -> Iterator[bytes]:
            start_time, received = time.monotonic(), 0
            for part in self._stream:
                received += len(part)
                seconds = time.monotonic() - start_time
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
            timeouts = request.extensions.get("timeout") or {}
            limits = {name: timeouts.get(name) or READ_SECONDS for name in ("connect", "read", "write", "pool")}
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
            pool._network_backend = _limited_backend(pool._network_backend, waiting)
        return Transport(transport)

    wrap_transports(client, wrap)
    return client


def _limited_backend(backend: Any, waiting: threading.local) -> Any:
    """Return a network backend for httpcore whose connections stop a transfer that is too slow.

    A connection sends a request and then reads the reply. Each of these two phases may take READ_SECONDS, plus the time
    that its bytes need at SLOWEST_BYTES per second. Headers may take only READ_SECONDS, regardless of their size.
    """
    import httpcore2

    class LimitedConnection(httpcore2.NetworkStream):
        def __init__(self, stream: Any):
            self._stream = stream
            self._phase = ""
            self._phase_start = 0.0
            self._seconds = 0.0  # time spent in reads or writes of this phase, without the pauses between them
            self._bytes = 0

        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            data: bytes = self._timed(
                "read", httpcore2.ReadTimeout, timeout, lambda seconds: self._stream.read(max_bytes, seconds)
            )
            self._bytes += len(data)
            return data

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            # The caller meant the timeout for the complete write, but each part may take that long.
            for offset in range(0, len(buffer), WRITTEN_BYTES):
                part = buffer[offset : offset + WRITTEN_BYTES]
                self._timed("written", httpcore2.WriteTimeout, timeout, partial(self._stream.write, part))
                self._bytes += len(part)

        def close(self) -> None:
            self._stream.close()

        def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> Any:
            return LimitedConnection(self._stream.start_tls(ssl_context, server_hostname, timeout))

        def get_extra_info(self, info: str) -> Any:
            return self._stream.get_extra_info(info)

        def _timed(
            self, phase: str, timeout_error: type[Exception], timeout: float | None, transfer: Callable[[float], Any]
        ) -> Any:
            """Call `transfer` with the remaining seconds, and return what it returns.

            Raises `timeout_error` if there is no time left.
            """
            if phase != self._phase:
                self._phase, self._phase_start, self._seconds, self._bytes = phase, time.monotonic(), 0.0, 0
            is_header = phase == "read" and getattr(waiting, "headers", False)
            start_time = time.monotonic()
            elapsed = start_time - self._phase_start if is_header else self._seconds
            remaining = READ_SECONDS + (0 if is_header else self._bytes / SLOWEST_BYTES) - elapsed
            try:
                if remaining <= 0:
                    raise timeout_error
                return transfer(min(timeout or READ_SECONDS, remaining))
            except timeout_error as error:
                seconds = elapsed + time.monotonic() - start_time
                where = " without reaching the end of the headers" * is_header
                raise timeout_error(f"{self._bytes:,} bytes {phase} in {seconds:.0f} s{where}") from error
            finally:
                self._seconds += time.monotonic() - start_time

    class LimitedBackend(httpcore2.NetworkBackend):
        def connect_tcp(self, *arguments: Any, **options: Any) -> Any:
            return LimitedConnection(backend.connect_tcp(*arguments, **options))

        def connect_unix_socket(self, *arguments: Any, **options: Any) -> Any:
            return LimitedConnection(backend.connect_unix_socket(*arguments, **options))

        def sleep(self, seconds: float) -> None:
            backend.sleep(seconds)

    return LimitedBackend()
