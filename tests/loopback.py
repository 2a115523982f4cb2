"""HTTP servers on loopback, each in a thread of this process."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LoopbackServer(ThreadingHTTPServer):
    """A server whose clients may be killed, or hang up when they have seen enough."""

    request_queue_size = 256  # connections that come at the same time

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # connections that were reset, by either side
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    """A handler of HTTP/1.1 that writes no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler], port: int = 0) -> Iterator[LoopbackServer]:
    """Answer requests by the handler while the context lasts; at a free port by default."""
    server = LoopbackServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
