"""The web application: OpenAI's API, and a chat page that uses it.

There are no CORS headers, so pages from other origins cannot use the server.
"""

import asyncio
import base64
import hashlib
import hmac
import re
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import BadInput
from common.web_page import HEAT_LEGEND, render
from evaluation.generation.prompts import forgotten_note
from evaluation.serve.answer import AnswerPart, ApiReply, ServedAnswer, as_event
from evaluation.serve.api_request import ApiError, ServedModel, read_request
from evaluation.serve.engine import Engine

BODY_BYTES = 1 << 20  # size limit of a request's body
BODY_SECONDS = 20.0  # time limit for the headers, and a separate one for the body
CODES = {404: "unknown_url", 405: "method_not_allowed"}
Queue = asyncio.Queue[tuple[int, AnswerPart | Exception]]
Parts = AsyncGenerator[tuple[int, AnswerPart], None]  # parts with the indices of their answers


def web_app(served: ServedModel, engine: Engine, key: bytes | None, names: Collection[str]) -> Starlette:
    """Return the application.

    `key`: the API key; None: no key is needed. `names`: the host names that the server answers to; empty: all names.
    """

    async def complete(request: Request, *, chat: bool) -> Response:
        answer_requests = await asyncio.to_thread(read_request, await read_body(request), served, chat=chat)
        loop, queue = asyncio.get_running_loop(), Queue()

        def post(index: int, part: AnswerPart | Exception) -> None:
            with suppress(RuntimeError):  # raised if the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, part))

        answers = [
            ServedAnswer(answer_request, served, partial(post, index))
            for index, answer_request in enumerate(answer_requests)
        ]
        engine.submit(answers)
        return await respond(ApiReply(answers, served), parts_of(answers, queue, request))

    async def models(request: Request) -> Response:
        entry = {"id": served.name, "object": "model", "created": 0, "owned_by": "lockstep"}
        name = request.path_params.get("name", served.name)
        if name != served.name:
            raise ApiError(404, f"the model '{name}' does not exist", param="model", code="model_not_found")
        return JSONResponse(entry if request.path_params else {"object": "list", "data": [entry]})

    return Starlette(
        routes=[
            Route("/", page_of(served), methods=["GET"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/v1/chat/completions", partial(complete, chat=True), methods=["POST"]),
            Route("/v1/completions", partial(complete, chat=False), methods=["POST"]),
        ],
        middleware=[Middleware(OriginGuard, key=key, names=names)],
        exception_handlers=dict.fromkeys((ApiError, BadInput, HTTPException, Exception), on_error),
    )


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises ApiError if it is too large or too slow."""
    content = bytearray()

    async def read() -> None:
        async for part in request.stream():
            content.extend(part)
            if len(content) > BODY_BYTES:
                raise ApiError(413, f"the body has more than {BODY_BYTES:,} bytes")

    try:
        await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client has disconnected") from error  # no client will receive this error
    return bytes(content)


async def parts_of(answers: list[ServedAnswer], queue: Queue, request: Request) -> Parts:
    """Yield the parts of a request's answers as they arrive.

    If the client disconnects, the slots are freed. An exception in any answer ends all of the request's answers.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        close(answers)
        queue.put_nowait((0, ConnectionError("the client has disconnected")))

    watch = asyncio.create_task(wait_for_disconnect())
    try:
        unfinished = len(answers)
        while unfinished:
            index, part = await queue.get()
            if isinstance(part, Exception):
                raise part
            unfinished -= part.finish is not None
            yield index, part
    finally:
        close(answers)
        watch.cancel()


def close(answers: list[ServedAnswer]) -> None:
    """Free the slots of answers that are no longer read."""
    for answer in answers:
        answer.closed = True


async def respond(reply: ApiReply, parts: Parts) -> Response:
    """Return the response to a request: a stream of events, or a body."""
    try:
        first = await anext(parts)  # an error before the first part can still determine the status of the response
        if reply.request.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events(reply, first, parts), media_type="text/event-stream", headers=headers)
        return JSONResponse(reply.body([first, *[part async for part in parts]]))
    except ConnectionError:
        return Response()  # the client has disconnected and will not receive this


async def events(reply: ApiReply, first: tuple[int, AnswerPart], parts: Parts) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error becomes the last event."""
    async with aclosing(parts):
        try:
            yield as_event(reply.chunk(*first, first=True))
            async for index, part in parts:
                yield as_event(reply.chunk(index, part))
            if reply.request.include_usage:
                yield as_event(reply.usage_chunk())
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield as_event(api_error(error).body)
            if not isinstance(error, ApiError | BadInput | ConnectionError):
                raise


class OriginGuard:
    """Middleware that refuses requests from other origins, and requests to the API without its key."""

    def __init__(self, app: ASGIApp, key: bytes | None, names: Collection[str]):
        self.app, self.key, self.names = app, key, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Request(scope))
        await (self.app if problem is None else await on_error(None, problem))(scope, receive, send)

    def _problem(self, request: Request) -> ApiError | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.names and re.sub(r":\d+$", "", host) not in self.names:
            return ApiError(403, f"Host: wanted one of the names {', '.join(self.names)}")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, "Origin: pages from other origins may not use this server")
        request_key = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self.key and request.url.path.startswith("/v1") and not hmac.compare_digest(request_key, self.key):
            return ApiError(401, "incorrect API key", code="invalid_api_key")
        return None


def page_of(served: ServedModel) -> HTMLResponse:
    """Return the chat page, with a policy that makes browsers refuse any other script, style or server."""
    values = {"model": served.name, "chat": served.trained.template is not None, "legend": HEAT_LEGEND}
    values["forgotten"] = forgotten_note(served.context)
    longest = min(served.longest_answer, served.context)
    html = render("evaluation/serve/chat_page.html", title=f"{served.name}: chat", longest=longest, **values)
    policy = "default-src 'none'; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for name in ("style", "script"):
        match = re.search(f"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = hashlib.sha256(match[1].encode() if match else b"").digest()
        policy += f"; {name}-src 'sha256-{base64.b64encode(digest).decode()}'"
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


def api_error(error: Exception) -> ApiError:
    """Convert any error to an error of the API. The text of an unexpected error appears only in the server's log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        problem = f"this URL or method is not available: {error.detail}"
        return ApiError(error.status_code, problem, code=CODES.get(error.status_code))
    return ApiError(500, str(error) if isinstance(error, BadInput) else "internal error; see the server's log")


async def on_error(_: Request | None, error: Exception) -> JSONResponse:
    """Return the response to a request that ended with an error."""
    failure = api_error(error)
    headers = {"Retry-After": "1"} if failure.status in (429, 503) else {}
    if failure.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(failure.body, failure.status, headers)
