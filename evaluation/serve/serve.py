"""Serve a model through OpenAI's API and a chat page, on loopback or, with an API key, on another address."""

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
KEY_CHARACTERS = 16  # smallest number of characters in a key
REQUEST_SECONDS, HEADER_BYTES = ANSWER_SECONDS + 30.0, 1 << 14
CONNECTIONS = 1024  # limit of open connections, and of connections that wait to be accepted


def run(command: ServeCommand) -> None:
    """Serve until SIGTERM, or until SIGINT, which raises KeyboardInterrupt.

    Raises BadInput for an address that is not loopback if there is no API key.
    """
    key = read_key(command)
    with listen(command, key) as listener:
        trained = load_for_generation(command)
        trained.stop_ids  # noqa: B018  # raises BadInput now, not at the first request, if the model has no tokenizer
        longest = command.tokens or trained.network.config.context_length
        name = trained.location.home.resolve().name.replace("--", "/")
        most = command.slots + command.queue
        served = ServedModel(trained=trained, name=name, longest_answer=longest, most_answers=most)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        # Without a key, other host names are refused, because a malicious page could make its own host name point to
        # this machine. With a key, this is not necessary, because such a page would not know the key.
        names = ("localhost", "127.0.0.1", shown) if key is None else ()
        engine, url = Engine(trained, command.slots, command.queue), f"http://{shown}:{port}"
        server = Server(engine, web_app(served, engine, key, names))
        signal.signal(signal.SIGTERM, server.handle_exit)  # uvicorn raises the signal again after it has stopped
        show(f"{trained.location.title}: {url} is the chat page, and {url}/v1 is OpenAI's API; Ctrl-C ends the server")
        server.run([listener])


def read_key(command: ServeCommand) -> bytes | None:
    """Return the API key from the file or the environment, or None. Raises BadInput for a key that is too short."""
    source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if command.api_key_file is not None:
        source = str(command.api_key_file)
        with refusing(f"--api-key-file {source}", kinds=(OSError, ValueError)):
            key = read_regular(command.api_key_file, 1 << 12).decode("ascii").strip()
    if key is None:
        return None
    if len(key) < KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        expected = f"an API key of at least {KEY_CHARACTERS} ASCII characters without spaces"
        raise BadInput(f"{source}: wanted {expected}; to create one, run openssl rand -hex 32")
    return key.encode()


def listen(command: ServeCommand, key: bytes | None) -> socket.socket:
    """Return a listening socket.

    Raises BadInput if the address is in use, or if it is not loopback and there is no API key.
    """
    where = f"--host {command.host} --port {command.port}"
    with refusing(where, "pass another host or port", kinds=(OSError, UnicodeError)):
        family, *_, address = socket.getaddrinfo(command.host, command.port, type=socket.SOCK_STREAM)[0]
        if key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise BadInput(
                f"--host {command.host}: this is not a loopback address, so an API key is needed; pass --api-key-file, "
                f"or set ${KEY_VARIABLE}"
            )
        return socket.create_server(address, family=family, backlog=CONNECTIONS)


class Server(uvicorn.Server):
    """uvicorn's server, extended so that it also stops the engine when it ends."""

    def __init__(self, engine: Engine, application: Starlette):
        self.engine = engine
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # hide warnings about malformed requests
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
        """Stop after a signal. A second SIGINT stops without waiting for answers."""
        self.engine.stop()
        super().handle_exit(sig, frame)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with time limits, so that slow clients are disconnected.

    One limit applies to the headers of a request, and another to the complete request with its answer.
    """

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end_within(BODY_SECONDS)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # the headers of a request are now complete
            self._end_within(REQUEST_SECONDS)

    def on_response_complete(self) -> None:
        self._end_within(BODY_SECONDS)  # uvicorn's keep-alive timeout is shorter, but a single byte cancels it
        super().on_response_complete()  # this may begin the next request

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.deadline is not None:
            self.deadline.cancel()

    def _end_within(self, seconds: float) -> None:
        """Set a new deadline, after which the connection is aborted."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.loop.call_later(seconds, self.transport.abort)
