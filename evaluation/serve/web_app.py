"""Web application: OpenAI's API, and a page that uses it; without CORS, so that no other origin can read or ask."""

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
from evaluation.generation.prompts import forgotten
from evaluation.serve.answer import AnswerPart, ApiReply, DrawnAnswer, as_event
from evaluation.serve.api_request import ApiError, ServedModel, read_request
from evaluation.serve.engine import Engine

BODY_BYTES = 1 << 20  # most of a request
BODY_SECONDS = 20.0  # to send it, and before it the headers
CODES = {404: "unknown_url", 405: "method_not_allowed"}
Queue = asyncio.Queue[tuple[int, AnswerPart | Exception]]
Parts = AsyncGenerator[tuple[int, AnswerPart], None]  # each with the index of its answer


def web_app(served: ServedModel, engine: Engine, key: bytes | None, names: Collection[str]) -> Starlette:
    """Return the application. `key`: of the API, None: open; `names`: hosts that it answers to; none: all."""

    async def complete(request: Request, *, chat: bool) -> Response:
        wanted = await asyncio.to_thread(read_request, await read_body(request), served, chat=chat)
        loop, queue = asyncio.get_running_loop(), Queue()

        def post(index: int, part: AnswerPart | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, part))

        answers = [DrawnAnswer(one, served, partial(post, index)) for index, one in enumerate(wanted)]
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
    """Return a request's body. Raises ApiError for one that is too large or too slow."""
    content = bytearray()

    async def read() -> None:
        async for part in request.stream():
            content.extend(part)
            if len(content) > BODY_BYTES:
                raise ApiError(413, f"the body has more than {BODY_BYTES:,} bytes")

    try:
        await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body has not come within {BODY_SECONDS:g} seconds") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client has left") from error  # nobody reads it
    return bytes(content)


async def parts_of(answers: list[DrawnAnswer], queue: Queue, request: Request) -> Parts:
    """Yield the parts of a request's answers as they come, while its client is there: one that leaves frees the slots.

    An exception of one answer ends all of them.
    """

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        close(answers)
        queue.put_nowait((0, ConnectionError("the client has left")))

    watch = asyncio.create_task(leave())
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


def close(answers: list[DrawnAnswer]) -> None:
    """Free the slots of answers that nobody reads any more."""
    for answer in answers:
        answer.closed = True


async def respond(reply: ApiReply, parts: Parts) -> Response:
    try:
        first = await anext(parts)  # refusals until then have their status
        if reply.request.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events(reply, first, parts), media_type="text/event-stream", headers=headers)
        return JSONResponse(reply.body([first, *[part async for part in parts]]))
    except ConnectionError:
        return Response()  # nobody reads it


async def events(reply: ApiReply, first: tuple[int, AnswerPart], parts: Parts) -> AsyncGenerator[bytes, None]:
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
    """Middleware: refuses other origins, and requests of the API without its key."""

    def __init__(self, app: ASGIApp, key: bytes | None, names: Collection[str]):
        self.app, self.key, self.names = app, key, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Request(scope))
        await (self.app if problem is None else await on_error(None, problem))(scope, receive, send)

    def _problem(self, request: Request) -> ApiError | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.names and re.sub(r":\d+$", "", host) not in self.names:
            return ApiError(403, f"Host: got another name than {', '.join(self.names)}")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, "Origin: a page of another origin may not use this server")
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self.key and request.url.path.startswith("/v1") and not hmac.compare_digest(given, self.key):
            return ApiError(401, "incorrect API key", code="invalid_api_key")
        return None


def page_of(served: ServedModel) -> HTMLResponse:
    """Return the page, with a policy by which a browser runs no other script and asks no other server."""
    values = {"model": served.name, "chat": served.trained.template is not None, "legend": HEAT_LEGEND}
    values["forgotten"] = forgotten(served.context)
    longest = min(served.longest_answer, served.context)
    html = render("evaluation/serve/chat_page.html", title=f"{served.name}: chat", longest=longest, **values)
    policy = "default-src 'none'; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for name in ("style", "script"):
        found = re.search(f"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = hashlib.sha256(found[1].encode() if found else b"").digest()
        policy += f"; {name}-src 'sha256-{base64.b64encode(digest).decode()}'"
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


def api_error(error: Exception) -> ApiError:
    """Return any error as one of the API; the text of a defect stays in the server's log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"this URL or method: {error.detail}", code=CODES.get(error.status_code))
    return ApiError(500, str(error) if isinstance(error, BadInput) else "internal error; the server's log has it")


async def on_error(_: Request | None, error: Exception) -> JSONResponse:
    told = api_error(error)
    headers = {"Retry-After": "1"} if told.status in (429, 503) else {}
    if told.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(told.body, told.status, headers)
