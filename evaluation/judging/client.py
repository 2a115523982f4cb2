"""Requests to a judge by OpenAI's client, each reserved in the budget before it leaves, retries included."""

import asyncio
import random
import re
import signal
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import attrs
import httpx2
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from tqdm import tqdm

from common.checks import is_absent
from common.errors import BadInput
from common.json_files import parse_json
from common.output import progress, show
from common.redaction import hidden_in
from common.text import dollars_at_most, quoted
from common.transports import wrap_transports
from evaluation.judging.judgement import Judgement, PromptVerdict, one_line
from evaluation.judging.prompt import Prompt
from evaluation.judging.store import Asked, Reply, Usage
from tokens.documents.messages import read_content

RETRIES, LONGEST_PAUSE_SECONDS = 6, 8.0  # of a request
LONGEST_ASKED_PAUSE_SECONDS = 60.0  # whatever a server asks for
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # error codes: this prompt, not others
REJECTED = (400, 413, 422)  # this prompt, if others are answered: it may be too long
UNUSABLE = (401, 402, 403, 404, 405)  # the same for every request, and for a repeated one
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not end
GAVE_UP = (408, 409, 425, 499)  # a gateway's timeout: the API behind it may go on, and bill
RETRIED = (*GAVE_UP, 429)  # as 500 and more
FAILED = (500, 503, 529)  # not billed if the API says so itself; other statuses say nothing of the API behind a gateway
UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.LocalProtocolError, httpx2.PoolTimeout, httpx2.ProxyError)

MOST_REPLY_BYTES = 1 << 24  # of a reply with its headers; the longest verdict has some 100 kB
GZIP = 47  # of zlib: a gzip or zlib header, whichever there is


class EndlessReply(Exception):
    """A server's reply has more than MOST_REPLY_BYTES, or an encoding that was not asked for."""


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Requests that end after their whole time, or the size of their reply, whatever the server does.

    httpx's own limits hold for each read alone: a server that drips bytes, or never stops, would be read for ever.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport, seconds: float):
        self._transport, self._seconds = transport, seconds
        self.sent: set[str] = set()  # ids of requests of which something may have left this machine

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        id = request.headers.get("X-Client-Request-Id", "")

        async def trace(event: str, details: dict[str, Any]) -> None:
            # A proxy is first asked for a connection, which the server does not see.
            if event.endswith("send_request_headers.started") and details["request"].method != b"CONNECT":
                self.sent.add(id)

        request.extensions = {**request.extensions, "trace": trace}
        try:
            return await asyncio.wait_for(self._exchange(request), self._seconds)
        except asyncio.TimeoutError as error:
            raise httpx2.ReadTimeout(f"no whole reply within {self._seconds:g} seconds", request=request) from error

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _exchange(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        try:
            content = await _bounded(response.stream)
        finally:
            await response.aclose()
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            content = _unpacked(content)
        elif encoding != "identity":
            raise EndlessReply(f"the reply is encoded as {encoding[:20]}, which was not asked for")
        for name in ("content-length", "transfer-encoding"):
            response.headers.pop(name, None)
        return httpx2.Response(response.status_code, headers=response.headers, content=content, request=request)


class RequestSlots:
    """The number of requests that may be under way.

    It is one at first, one more after each verdict, and half as many after each failure.

    The first request shows what a request costs, and a server that refuses or fails gets fewer requests at once.
    """

    def __init__(self, most: int):
        self._most = most
        self.allowed = 1
        self._excess = 0  # slots that are taken but no longer allowed
        self._slots = asyncio.Semaphore(1)

    async def __aenter__(self) -> None:
        await self._slots.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._give()

    def widen(self) -> None:
        if self.allowed < self._most:
            self.allowed += 1
            self._give()

    def halve(self) -> None:
        """Allow half as many requests. Those under way continue, and the next ones wait until fewer are left."""
        kept = max(1, self.allowed // 2)
        self._excess += self.allowed - kept
        self.allowed = kept

    def _give(self) -> None:
        if self._excess > 0:
            self._excess -= 1
        else:
            self._slots.release()


class Asker:
    """Sends the requests of a session, as many at once as RequestSlots allows, up to --concurrency."""

    def __init__(self, judgement: Judgement, key: str):
        self._judgement, self._key = judgement, key
        url, timeout = judgement.judge.base_url, judgement.options.timeout
        http = DefaultAsyncHttpxClient(follow_redirects=False, headers={"Accept-Encoding": "identity"})
        self._transports = _bound(http, timeout)
        self._client = AsyncOpenAI(
            api_key=key or "none", base_url=url, timeout=timeout, max_retries=0, http_client=http
        )
        self._slots = RequestSlots(judgement.options.concurrency)
        self._reached = False  # the server has answered

    async def ask(self) -> None:
        """Send what is outstanding. The first SIGINT, SIGTERM or SIGHUP stops sending, the second waiting."""
        judgement, before, task = self._judgement, -1, asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, task)
        with suppress(asyncio.CancelledError):
            async with self._client:
                while (prompts := judgement.outstanding()) and before != len(judgement.store.replies):
                    before = len(judgement.store.replies)
                    judgement.over_budget = None  # replies have made room since
                    with tqdm(total=len(prompts), disable=None, unit="verdict") as bar:
                        await asyncio.gather(*(self._ask(prompt, bar) for prompt in prompts))
                    if judgement.over_budget is None:
                        return

    def _stop(self, task: asyncio.Task[None]) -> None:
        if self._judgement.interrupted:
            task.cancel()
            return
        self._judgement.interrupted = True
        show(progress("stopping: waiting for requests in flight; press Ctrl-C again to abandon them"))

    async def _ask(self, prompt: Prompt, bar: tqdm) -> None:
        """Ask a prompt until it is settled, it fails, or nothing more is to be sent."""
        judgement = self._judgement
        try:
            while not judgement.stopping and not judgement.is_settled(prompt):
                async with self._slots:
                    outcome = None if judgement.stopping else await self._send(prompt)
                if isinstance(outcome, PromptVerdict):
                    judgement.failed[prompt.key] = outcome
                if not isinstance(outcome, Reply):
                    break
                if judgement.take(outcome):
                    self._slots.widen()
        except Exception as error:  # noqa: BLE001  # the other prompts' replies are paid for: keep them
            judgement.fail(error)
        bar.set_postfix_str(dollars_at_most(judgement.cost.usd))
        bar.update()

    async def _send(self, prompt: Prompt) -> Reply | PromptVerdict | None:
        """Return the reply to a request, or its failure, after RETRIES more; None: nothing more is to be sent."""
        judgement = self._judgement
        failure: Reply | PromptVerdict | None = None
        for attempt in range(RETRIES + 1):
            asked, body = judgement.request(prompt)
            if not judgement.reserve(asked):
                return failure
            # A server that knows this header answers a repeated request with the reply that it has billed already.
            key = f"{asked.key}-{len(judgement.store.by_prompt[prompt.key])}-{asked.limit}"
            headers = {"Idempotency-Key": key, "X-Client-Request-Id": asked.id}
            try:
                raw = await self._client.chat.completions.with_raw_response.create(**body, extra_headers=headers)
                self._reached = True
                body = parse_json(hidden_in(raw.http_response.text, self._key), unique=False)
                return read_reply(asked, hidden_in(body, self._key))
            except APIConnectionError as error:
                why = one_line(hidden_in(f"{error}: {error.__cause__}", self._key))
                failure, pause = PromptVerdict("missing", why), 0.0
                self._slots.halve()
                self._note_lost(asked, error.__cause__)
                if isinstance(error.__cause__, EndlessReply):
                    return failure  # a repeated request would be billed again, and answered alike
            except APIStatusError as error:
                self._reached, failure = True, self._explained(error, asked)
                if not _may_be_billed(error.response):
                    judgement.release(asked, f"status {error.status_code}")
                again = error.status_code in RETRIED or error.status_code >= 500
                if again:
                    self._slots.halve()
                if isinstance(failure, Reply) or not again or attempt == RETRIES:
                    break
                pause = _asked_pause(error.response)
            except Exception as error:
                why = one_line(hidden_in(str(error), self._key))
                if not self._was_sent(asked):  # such as a header of OPENAI_ORG_ID that holds no ASCII
                    judgement.release(asked, why)
                    raise BadInput(f"{judgement.judge.base_url}: no request can be made: {why}") from error
                if not isinstance(error, ValueError):
                    raise
                failure = PromptVerdict("missing", f"half a reply, or none: {why}")
                break
            await asyncio.sleep(pause or min(0.5 * 2**attempt, LONGEST_PAUSE_SECONDS) * random.uniform(0.75, 1))
        else:
            return failure  # requests without a response are counted
        judgement.unanswered_in_a_row += 1
        return failure

    def _note_lost(self, asked: Asked, cause: BaseException | None) -> None:
        """Note a request without a response, which may have been billed unless it was not sent."""
        judgement = self._judgement
        judgement.unanswered_in_a_row += 1
        if isinstance(cause, UNSENT) or not self._was_sent(asked):
            judgement.release(asked, one_line(hidden_in(str(cause), self._key)))
            if not self._reached:
                url = judgement.judge.base_url
                why = one_line(hidden_in(str(cause), self._key)) or type(cause).__name__
                judgement.fail(BadInput(f"{url}: no server: {why}; start it, or pass another --base-url"))

    def _was_sent(self, asked: Asked) -> bool:
        """Tell whether anything of a request may have left this machine."""
        return any(asked.id in transport.sent for transport in self._transports)

    def _explained(self, error: APIStatusError, asked: Asked) -> Reply | PromptVerdict:
        """Return the refusal or failure that an error is; one that all requests would get ends the session."""
        said = server_message(error.body) or f"status {error.status_code}"
        why = f"{error.status_code}: {one_line(hidden_in(said, self._key))}"
        if error.code in REFUSED:
            return Reply(key=asked.key, asked=asked.id, id=None, text="", refusal=why, usage=Usage(input=0, output=0))
        if error.status_code < 400:
            why = f"{error.status_code}: redirects are not followed; pass the final address as --base-url"
        if error.status_code in UNUSABLE or error.status_code < 400 or error.code == NO_CREDIT:
            self._judgement.fail(BadInput(f"{self._judgement.judge.base_url}: {why}"))
        return PromptVerdict("not taken" if error.status_code in REJECTED else "missing", why)


def _bound(client: httpx2.AsyncClient, seconds: float) -> list[BoundedTransport]:
    """Bound all transports of a client, those of proxies too; return them."""
    bounded: dict[int, BoundedTransport] = {}

    def wrapped(transport: httpx2.AsyncBaseTransport) -> BoundedTransport:
        return bounded.setdefault(id(transport), BoundedTransport(transport, seconds))

    wrap_transports(client, wrapped)
    return [*bounded.values()]


async def _bounded(stream: AsyncIterator[bytes] | httpx2.AsyncByteStream) -> bytes:
    """Return the content of a reply. Raises EndlessReply for one that is too large."""
    content = bytearray()
    async for part in stream:
        content += part
        if len(content) > MOST_REPLY_BYTES:
            raise EndlessReply(f"the reply has more than {MOST_REPLY_BYTES:,} bytes")
    return bytes(content)


def _unpacked(content: bytes) -> bytes:
    """Return the content of a gzipped reply. Raises EndlessReply for one that is too large, or damaged."""
    unpacker = zlib.decompressobj(GZIP)
    try:
        unpacked = unpacker.decompress(content, MOST_REPLY_BYTES)
    except zlib.error as error:
        raise EndlessReply(f"the reply is damaged: {error}") from error
    if unpacker.unconsumed_tail:
        raise EndlessReply(f"the reply has more than {MOST_REPLY_BYTES:,} bytes")
    return unpacked


def read_reply(asked: Asked, body: Any) -> Reply:
    """Return the content of a chat completion. One of another form is paid for as well: an invalid verdict.

    A field that is null, empty or missing is absent, except for the choices and their message. The content of a message
    may be missing only if the judge refuses. A field of another type is refused: its text, such as "None" or "5", is
    nothing that the judge wrote.
    """
    reply = Reply(key=asked.key, asked=asked.id, id=None, text="", refusal=None, usage=_usage(body.get("usage")))
    try:
        choices = body["choices"]
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"choices: got {quoted(choices)}, wanted a list that is not empty")
        choice = choices[0]
        message, finish = choice["message"], _text(choice, "finish_reason")
        refusal = _text(message, "refusal") or ("content filter" if finish == "content_filter" else None)
        content = message["content"] if refusal is None else message.get("content")
        model = _text(body, "model")
        return attrs.evolve(
            reply,
            id=_text(body, "id"),
            text="" if is_absent(content) else read_content(content, "content"),
            refusal=None if refusal is None else one_line(refusal),
            model=None if model is None else one_line(model),
            cut=finish == "length",
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = server_message(body.get("error"))
        return attrs.evolve(reply, error=one_line(said or f"no chat completion: {_described(error)}"))


def server_message(error: Any) -> str | None:
    """Return the message of an error that a server sent, as a text or as an object with a message; None without."""
    message = error.get("message") if isinstance(error, dict) else error
    if is_absent(message):
        return None if is_absent(error) else quoted(error)
    return message if isinstance(message, str) else quoted(error)


def _text(values: dict[str, Any], key: str) -> str | None:
    """Return a text, or None if it is absent. Raises ValueError for a value of another type."""
    value = values.get(key)
    if is_absent(value):
        return None
    if not isinstance(value, str):
        raise ValueError(f"{key}: got {quoted(value)}, wanted a text")
    return value


def _described(error: Exception) -> str:
    """Return the problem of a reply of another form."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error.args[-1]) if isinstance(error, ValueError) else "wanted an object with choices and a message"


def _usage(usage: Any) -> Usage | None:
    """Return the token counts of a reply; None if they cannot be right."""
    try:
        details = usage.get("prompt_tokens_details")
        details = {} if is_absent(details) else details
        given: list[Any] = [details.get(name) for name in ("cached_tokens", "cache_write_tokens")]
        cached, written = (0 if is_absent(count) else count for count in given)
        read, said = usage["prompt_tokens"], usage["completion_tokens"]
        return Usage(input=read, cached_input=cached, cache_write=written, output=said) if read and said else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _asked_pause(response: httpx2.Response) -> float:
    """Return the seconds that a server asks to wait, a minute at most; 0: it does not, or no longer."""
    asked = response.headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", asked, re.ASCII):
        return min(float(asked), LONGEST_ASKED_PAUSE_SECONDS)
    try:  # HTTP also allows a date, always in GMT
        seconds = (parsedate_to_datetime(asked) - datetime.now(timezone.utc)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_ASKED_PAUSE_SECONDS)


def _may_be_billed(response: httpx2.Response) -> bool:
    """Tell whether a request that ended with this error may have been done, and billed, all the same."""
    if response.status_code < 500:
        return response.status_code in GAVE_UP
    try:
        return response.status_code not in FAILED or not parse_json(response.content).get("error")
    except ValueError:
        return True
