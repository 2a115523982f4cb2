"""Server of a model: OpenAI's API and a page, on loopback, or with an API key on another address."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import BadInput, refusing
from common.json_files import read_regular
from common.output import show
from evaluation.command_line import ServeCommand
from evaluation.generation.generated_text import load_for_generation
from evaluation.serve.answer import ANSWER_SECONDS
from evaluation.serve.api_request import ServedModel
from evaluation.serve.engine import GRACE_SECONDS, Engine
from evaluation.serve.web_app import BODY_SECONDS, web_app

KEY_VARIABLE = "LOCKSTEP_API_KEY"
KEY_CHARACTERS = 16  # least
REQUEST_SECONDS, HEADER_BYTES = ANSWER_SECONDS + 30.0, 1 << 14
CONNECTIONS = 1024  # that wait to be accepted, and of those that have been


def run(command: ServeCommand) -> None:
    """Serve until SIGTERM, or SIGINT, which raises KeyboardInterrupt. Raises BadInput for an address without a key."""
    key = read_key(command)
    with listen(command, key) as listener:
        trained = load_for_generation(command)
        trained.stop_ids  # noqa: B018  # a model without a tokenizer is refused here, not at the first request
        longest = command.tokens or trained.network.config.context_length
        name = trained.place.home.resolve().name.replace("--", "/")
        most = command.slots + command.queue
        served = ServedModel(trained=trained, name=name, longest_answer=longest, most_answers=most)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        names = ("localhost", "127.0.0.1", shown) if key is None else ()  # a page whose name was rebound has no key
        engine, url = Engine(trained, command.slots, command.queue), f"http://{shown}:{port}"
        server = Server(engine, web_app(served, engine, key, names))
        signal.signal(signal.SIGTERM, server.handle_exit)  # uvicorn raises a signal again at its end
        show(f"{trained.place.title}: {url} is the page, {url}/v1 OpenAI's API; Ctrl-C ends the server")
        server.run([listener])


def read_key(command: ServeCommand) -> bytes | None:
    """Return the API key of a file or the environment. Raises BadInput for a short one."""
    place, given = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if command.api_key_file is not None:
        place = str(command.api_key_file)
        with refusing(f"--api-key-file {place}", kinds=(OSError, ValueError)):
            given = read_regular(command.api_key_file, 1 << 12).decode("ascii").strip()
    if given is None:
        return None
    if len(given) < KEY_CHARACTERS or not given.isascii() or not given.isprintable() or " " in given:
        wanted = f"an API key of at least {KEY_CHARACTERS} ASCII characters without spaces"
        raise BadInput(f"{place}: wanted {wanted}; make one: openssl rand -hex 32")
    return given.encode()


def listen(command: ServeCommand, key: bytes | None) -> socket.socket:
    """Return a listening socket. Raises BadInput for an address that is taken, or not loopback and without a key."""
    where = f"--host {command.host} --port {command.port}"
    with refusing(where, "pass another", kinds=(OSError, UnicodeError)):
        family, *_, address = socket.getaddrinfo(command.host, command.port, type=socket.SOCK_STREAM)[0]
        if key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise BadInput(f"--host {command.host}: not loopback: pass an API key: --api-key-file or ${KEY_VARIABLE}")
        return socket.create_server(address, family=family, backlog=CONNECTIONS)


class Server(uvicorn.Server):
    """uvicorn's server of an application, whose engine ends with it."""

    def __init__(self, engine: Engine, application: Starlette):
        self.engine = engine
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not each malformed request
        config = uvicorn.Config(
            application,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=int(2 * GRACE_SECONDS),
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal, at a second SIGINT without waiting."""
        self.engine.stop()
        super().handle_exit(sig, frame)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a deadline of headers, and of a request with its whole answer: a slow client is dropped."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end_within(BODY_SECONDS)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # the headers of a request are complete
            self._end_within(REQUEST_SECONDS)

    def on_response_complete(self) -> None:
        self._end_within(BODY_SECONDS)  # uvicorn's keep-alive timeout is shorter, but any byte ends that
        super().on_response_complete()  # may begin the next request

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.deadline is not None:
            self.deadline.cancel()

    def _end_within(self, seconds: float) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.loop.call_later(seconds, self.transport.abort)
