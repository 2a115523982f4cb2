"""Servers on loopback whose responses never end: they drip, stream or redirect as long as the client is connected."""

import functools
import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.loopback import QuietHandler, serving

DRIP_SECONDS = 0.05
Misbehaviour = Callable[["EndlessHandler"], None]


class EndlessHandler(QuietHandler):
    """A handler that responds to each request with one kind of misbehavior."""

    def __init__(self, misbehaviour: Misbehaviour, released: threading.Event, *arguments: object):
        self.misbehaviour, self.released = misbehaviour, released
        super().__init__(*arguments)  # type: ignore[arg-type]

    def answer(self) -> None:
        self.close_connection = True
        self.received()
        self.misbehaviour(self)

    do_HEAD = do_GET = do_POST = do_PUT = answer

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def drip(self) -> None:
        """Send single bytes with pauses, until the client disconnects or the test ends."""
        while not self.released.wait(DRIP_SECONDS):
            self.write(b" ")


def dripped_headers(handler: EndlessHandler) -> None:
    handler.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    handler.drip()


def endless_interim_replies(handler: EndlessHandler) -> None:
    """Send 103 Early Hints without end. Each is a complete response, but not the final response."""
    while not handler.released.is_set():
        handler.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10)


def dripped_chunk_frame(handler: EndlessHandler) -> None:
    """Drip the extension of a chunk, which is not part of the content."""
    handler.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1;")
    while not handler.released.wait(DRIP_SECONDS):
        handler.write(b"a")


def dripped_body(handler: EndlessHandler) -> None:
    handler.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n")
    handler.drip()


def chunks(handler: EndlessHandler) -> None:
    """Send large chunks without end."""
    handler.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not handler.released.is_set():
        handler.write(b"10000\r\n" + b" " * 65536 + b"\r\n")


def dripped_chunks(handler: EndlessHandler) -> None:
    handler.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not handler.released.wait(DRIP_SECONDS):
        handler.write(b"1\r\n \r\n")


def redirects(handler: EndlessHandler) -> None:
    handler.send_content(b"", 302, {"Location": handler.path + "a"})


def large_body(handler: EndlessHandler) -> None:
    """Announce a terabyte of content, and send it."""
    handler.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000000000\r\n\r\n")
    while not handler.released.is_set():
        handler.write(b" " * 65536)


def gzip_bomb(handler: EndlessHandler) -> None:
    """Send 20 MB that are compressed to 20 kB."""
    handler.send_content(packed_zeros(), 200, {"Content-Encoding": "gzip"})


@functools.cache
def packed_zeros() -> bytes:
    return gzip.compress(bytes(20_000_000), 6)


@contextmanager
def serve(misbehaviour: Misbehaviour) -> Iterator[str]:
    """Run a server with this misbehavior while the context lasts, and yield its URL."""
    released = threading.Event()
    packed_zeros()  # computed now and cached, so that no client's timeout includes this time
    with serving(functools.partial(EndlessHandler, misbehaviour, released)) as server:
        try:
            yield server.url
        finally:
            released.set()
