"""HTTP servers on loopback, each in a thread of this process; one of them serves files and can fail at intervals."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs


class LoopbackServer(ThreadingHTTPServer):
    """A server whose clients may be killed or disconnect early."""

    request_queue_size = 256  # this many connections may arrive at the same time

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # an OSError means that either side reset the connection
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    """A handler for HTTP/1.1 that writes no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def received(self) -> bytes:
        """Return the content of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def requested_part(self, data: bytes) -> tuple[bytes, int, dict[str, str]]:
        """Return the requested range of a file, or all of it, with the status and headers of the response."""
        requested = self.headers.get("Range")
        if not requested:
            return data, 200, {}
        begin, _, end = requested.removeprefix("bytes=").partition("-")
        first = int(begin or 0)
        part = data[first : int(end) + 1 if end else None]
        return part, 206, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}

    def send_content(
        self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, sent: int | None = None
    ) -> None:
        """Send a response, which is JSON unless its headers say otherwise.

        If `sent` is given, the connection breaks off after this many bytes.
        """
        fixed = {"Content-Length": str(len(content)), "Content-Type": "application/json"}
        try:
            self.send_response_only(status)
            for name, value in (fixed | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[:sent])
        except OSError:  # the client has disconnected
            self.close_connection = True
        self.close_connection |= sent is not None


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[LoopbackServer]:
    """Handle requests at a free port while the context lasts."""
    server = LoopbackServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@attrs.define
class FileServer:
    """A server of files, and the ways in which it fails."""

    url: str = ""
    requests: list[str] = attrs.field(factory=list)
    ranges: bool = True  # whether the server supports range requests
    busy_every: int = 0  # every N-th response has status 503; 0 means none
    drop_every: int = 0  # every N-th response to a range request breaks off halfway; 0 means none


@contextmanager
def serve_files(folder: Path) -> Iterator[FileServer]:
    """Serve a folder while the context lasts."""
    files = FileServer()

    class Handler(QuietHandler, SimpleHTTPRequestHandler):
        def answer(self) -> None:
            requested = self.headers.get("Range", "")
            files.requests.append(f"{self.command} {self.path} {requested}".strip())
            number = len(files.requests)
            if files.busy_every and number % files.busy_every == 0:
                return self.send_error(503)
            path = Path(self.translate_path(self.path))
            if not (files.ranges and requested and path.is_file()):
                return super().do_GET() if self.command == "GET" else super().do_HEAD()
            part, status, headers = self.requested_part(path.read_bytes())
            dropped = files.drop_every and number % files.drop_every == 0
            return self.send_content(part, status, headers, len(part) // 2 if dropped else None)

        do_HEAD = do_GET = answer

    with serving(functools.partial(Handler, directory=str(folder))) as server:
        files.url = server.url
        yield files
