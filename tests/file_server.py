"""A plain web server on loopback that sends a folder's files by ranges, and can be made to fail now and then."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import attrs

from tests.loopback import QuietHandler, serving


@attrs.define
class FileServer:
    """A server of files, and its ailments."""

    url: str = ""
    requests: list[str] = attrs.field(factory=list)
    ranges: bool = True
    busy_every: int = 0  # this many requests; 0: never
    drop_every: int = 0  # the connection, after half of what was asked for


@contextmanager
def serve_files(folder: Path) -> Iterator[FileServer]:
    """Serve a folder while the context lasts."""
    files = FileServer()

    class Handler(QuietHandler, SimpleHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            asked = self.headers.get("Range", "")
            files.requests.append(f"{self.command} {self.path} {asked}".strip())
            number = len(files.requests)
            if files.busy_every and number % files.busy_every == 0:
                return self.send_error(503)
            path = Path(self.translate_path(self.path))
            if not (files.ranges and asked and path.is_file()):
                return super().do_GET() if self.command == "GET" else super().do_HEAD()
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            data = path.read_bytes()
            part = data[int(begin) : int(end) + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}")
            self.end_headers()
            if files.drop_every and number % files.drop_every == 0:
                part = part[: len(part) // 2]
                self.close_connection = True
            self.wfile.write(part)
            return None

    with serving(functools.partial(Handler, directory=str(folder))) as server:
        files.url = server.url
        yield files
