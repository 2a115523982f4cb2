"""Send requests to a judge through OpenAI's client. The cost of a request or retry is reserved before it is sent."""

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
from evaluation.judging.judgment import Judgment, PromptVerdict, one_line
from evaluation.judging.prompt import Prompt
from evaluation.judging.store import JudgeRequest, Reply, Usage
from tokens.documents.messages import read_content

RETRIES, LONGEST_PAUSE_SECONDS = 6, 8.0  # number of retries per request, and limit of the pause before a retry
LONGEST_ASKED_PAUSE_SECONDS = 60.0  # longest pause that a server can make us wait
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # error codes that concern a single prompt
# If other prompts are answered, these statuses concern a single prompt, which may be too long, for example.
REJECTED = (400, 413, 422)
UNUSABLE = (401, 402, 403, 404, 405)  # every request would get the same status, however often it is repeated
NO_CREDIT = "insufficient_quota"  # error code of a 429 that does not go away with time
GAVE_UP = (408, 409, 425, 499)  # a gateway timed out, but the API behind it may continue and bill the request
RETRIED = (*GAVE_UP, 429)  # statuses from 500 on are retried, too
# A request with one of these statuses is not billed if the API itself reports the status. Other statuses from 500 on
# may come from a gateway, so their requests count as billed.
FAILED = (500, 503, 529)
UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.LocalProtocolError, httpx2.PoolTimeout, httpx2.ProxyError)

MOST_REPLY_BYTES = 1 << 24  # size limit of a reply, including its headers; the longest verdict has about 100 kB
GZIP = 47  # tells zlib to accept a gzip header or a zlib header


class EndlessReply(Exception):
    """A server's reply has more than MOST_REPLY_BYTES, or an encoding that the client did not accept."""


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A transport that limits the total time of a request and the size of its reply, whatever the server does.

    httpx's own limits apply only to single reads: they would not end a request if the server sent its reply very
    slowly, or without an end.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport, seconds: float):
        self._transport, self._seconds = transport, seconds
        self.sent: set[str] = set()  # ids of requests that may have left this machine, at least in part

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        id = request.headers.get("X-Client-Request-Id", "")

        async def trace(event: str, details: dict[str, Any]) -> None:
            # A proxy first gets a CONNECT request, which the server does not see.
            if event.endswith("send_request_headers.started") and details["request"].method != b"CONNECT":
                self.sent.add(id)

        request.extensions = {**request.extensions, "trace": trace}
        try:
            return await asyncio.wait_for(self._exchange(request), self._seconds)
        except asyncio.TimeoutError as error:
            raise httpx2.ReadTimeout(f"no complete reply within {self._seconds:g} seconds", request=request) from error

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _exchange(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        try:
            content = await _read_limited(response.stream)
        finally:
            await response.aclose()
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            content = _decompress(content)
        elif encoding != "identity":
            raise EndlessReply(f"the reply is encoded as {encoding[:20]}, which the client did not accept")
        for name in ("content-length", "transfer-encoding"):
            response.headers.pop(name, None)
        return httpx2.Response(response.status_code, headers=response.headers, content=content, request=request)


class RequestSlots:
    """A limit on the number of simultaneous requests.

    It starts at one, grows by one with every verdict, and is halved by every failure. In this way, the first request
    shows what a request costs, and a server that refuses or fails gets fewer requests at once.
    """

    def __init__(self, most: int):
        self._most = most
        self.allowed = 1
        self._excess = 0  # number of slots that are in use but no longer allowed
        self._slots = asyncio.Semaphore(1)

    async def __aenter__(self) -> None:
        await self._slots.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def widen(self) -> None:
        """Allow one more simultaneous request, up to the maximum."""
        if self.allowed < self._most:
            self.allowed += 1
            self._release()

    def halve(self) -> None:
        """Allow half as many requests. Running requests continue; new ones wait until few enough are running."""
        remaining = max(1, self.allowed // 2)
        self._excess += self.allowed - remaining
        self.allowed = remaining

    def _release(self) -> None:
        """Make a slot available again, or remove it if fewer slots are allowed now."""
        if self._excess > 0:
            self._excess -= 1
        else:
            self._slots.release()


class Asker:
    """The sender of a session's requests. RequestSlots keeps the number in flight at or below --concurrency."""

    def __init__(self, judgment: Judgment, key: str):
        self._judgment, self._key = judgment, key
        url, timeout = judgment.judge.base_url, judgment.options.timeout
        http = DefaultAsyncHttpxClient(follow_redirects=False, headers={"Accept-Encoding": "identity"})
        self._transports = _limit_transports(http, timeout)
        self._client = AsyncOpenAI(
            api_key=key or "none", base_url=url, timeout=timeout, max_retries=0, http_client=http
        )
        self._slots = RequestSlots(judgment.options.concurrency)
        self._reached = False  # True once the server has answered

    async def ask(self) -> None:
        """Send all outstanding requests.

        After the first SIGINT, SIGTERM or SIGHUP, no more requests are sent. A second signal abandons the requests
        in flight.
        """
        judgment, before, task = self._judgment, -1, asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, task)
        with suppress(asyncio.CancelledError):
            async with self._client:
                while (prompts := judgment.outstanding()) and before != len(judgment.store.replies):
                    before = len(judgment.store.replies)
                    judgment.over_budget = None  # the replies have freed some of the budget
                    with tqdm(total=len(prompts), disable=None, unit="verdict") as bar:
                        await asyncio.gather(*(self._ask(prompt, bar) for prompt in prompts))
                    if judgment.over_budget is None:
                        return

    def _stop(self, task: asyncio.Task[None]) -> None:
        if self._judgment.interrupted:
            task.cancel()
            return
        self._judgment.interrupted = True
        show(progress("stopping: waiting for requests in flight; press Ctrl-C again to abandon them"))

    async def _ask(self, prompt: Prompt, bar: tqdm) -> None:
        """Send a prompt until it is settled or has failed, or until the session stops."""
        judgment = self._judgment
        try:
            while not judgment.stopping and not judgment.is_settled(prompt):
                async with self._slots:
                    outcome = None if judgment.stopping else await self._send(prompt)
                if isinstance(outcome, PromptVerdict):
                    judgment.failed[prompt.key] = outcome
                if not isinstance(outcome, Reply):
                    break
                if judgment.take(outcome):
                    self._slots.widen()
        # Any error must end the session in an orderly way, because the replies to the other prompts are already paid
        # for.
        except Exception as error:  # noqa: BLE001
            judgment.fail(error)
        bar.set_postfix_str(dollars_at_most(judgment.cost.usd))
        bar.update()

    async def _send(self, prompt: Prompt) -> Reply | PromptVerdict | None:
        """Send a request, retry it up to RETRIES times, and return its reply or the last failure.

        Return None if the session stops before the first attempt.
        """
        judgment = self._judgment
        failure: Reply | PromptVerdict | None = None
        for attempt in range(RETRIES + 1):
            request, body = judgment.request(prompt)
            if not judgment.reserve(request):
                return failure
            # A server that supports this header answers a repeated request with the reply that it has already billed.
            key = f"{request.key}-{len(judgment.store.by_prompt[prompt.key])}-{request.limit}"
            headers = {"Idempotency-Key": key, "X-Client-Request-Id": request.id}
            try:
                raw = await self._client.chat.completions.with_raw_response.create(**body, extra_headers=headers)
                self._reached = True
                body = parse_json(hidden_in(raw.http_response.text, self._key), unique=False)
                return read_reply(request, hidden_in(body, self._key))
            except APIConnectionError as error:
                why = one_line(hidden_in(f"{error}: {error.__cause__}", self._key))
                failure, pause = PromptVerdict("missing", why), 0.0
                self._slots.halve()
                self._record_no_response(request, error.__cause__)
                if isinstance(error.__cause__, EndlessReply):
                    return failure  # a repeated request would be billed again and get the same reply
            except APIStatusError as error:
                self._reached, failure = True, self._outcome_of(error, request)
                if not _may_be_billed(error.response):
                    judgment.release(request, f"status {error.status_code}")
                is_retried = error.status_code in RETRIED or error.status_code >= 500
                if is_retried:
                    self._slots.halve()
                if isinstance(failure, Reply) or not is_retried or attempt == RETRIES:
                    break
                pause = _asked_pause(error.response)
            except Exception as error:
                why = one_line(hidden_in(str(error), self._key))
                # A request cannot be sent if, for example, OPENAI_ORG_ID is not ASCII and so cannot be in a header.
                if not self._was_sent(request):
                    judgment.release(request, why)
                    raise BadInput(f"{judgment.judge.base_url}: the request cannot be sent: {why}") from error
                if not isinstance(error, ValueError):
                    raise
                failure = PromptVerdict("missing", f"the reply is incomplete: {why}")
                break
            await asyncio.sleep(pause or min(0.5 * 2**attempt, LONGEST_PAUSE_SECONDS) * random.uniform(0.75, 1))
        else:
            return failure  # _record_no_response has already counted each of these failures
        judgment.unanswered_in_a_row += 1
        return failure

    def _record_no_response(self, request: JudgeRequest, cause: BaseException | None) -> None:
        """Record that a request got no response. The request counts as billed unless it was certainly not sent."""
        judgment = self._judgment
        judgment.unanswered_in_a_row += 1
        if isinstance(cause, UNSENT) or not self._was_sent(request):
            judgment.release(request, one_line(hidden_in(str(cause), self._key)))
            if not self._reached:
                url = judgment.judge.base_url
                why = one_line(hidden_in(str(cause), self._key)) or type(cause).__name__
                judgment.fail(
                    BadInput(f"{url}: cannot be reached: {why}; start the server, or pass another --base-url")
                )

    def _was_sent(self, request: JudgeRequest) -> bool:
        """Return whether any part of a request may have left this machine."""
        return any(request.id in transport.sent for transport in self._transports)

    def _outcome_of(self, error: APIStatusError, request: JudgeRequest) -> Reply | PromptVerdict:
        """Return the refusal or failure that an error stands for.

        If every request would get the same error, the session ends, too.
        """
        message = server_message(error.body) or f"status {error.status_code}"
        why = f"{error.status_code}: {one_line(hidden_in(message, self._key))}"
        if error.code in REFUSED:
            usage = Usage(input=0, output=0)
            return Reply(key=request.key, asked=request.id, id=None, text="", refusal=why, usage=usage)
        if error.status_code < 400:
            why = f"{error.status_code}: redirects are not followed; pass the final address with --base-url"
        if error.status_code in UNUSABLE or error.status_code < 400 or error.code == NO_CREDIT:
            self._judgment.fail(BadInput(f"{self._judgment.judge.base_url}: {why}"))
        return PromptVerdict("not taken" if error.status_code in REJECTED else "missing", why)


def _limit_transports(client: httpx2.AsyncClient, seconds: float) -> list[BoundedTransport]:
    """Wrap each transport of a client, including those for proxies, in a BoundedTransport. Return the wrappers."""
    bounded: dict[int, BoundedTransport] = {}

    def wrap(transport: httpx2.AsyncBaseTransport) -> BoundedTransport:
        return bounded.setdefault(id(transport), BoundedTransport(transport, seconds))

    wrap_transports(client, wrap)
    return [*bounded.values()]


async def _read_limited(stream: AsyncIterator[bytes] | httpx2.AsyncByteStream) -> bytes:
    """Return the content of a reply. Raises EndlessReply if it is too large."""
    content = bytearray()
    async for part in stream:
        content += part
        if len(content) > MOST_REPLY_BYTES:
            raise EndlessReply(f"the reply has more than {MOST_REPLY_BYTES:,} bytes")
    return bytes(content)


def _decompress(content: bytes) -> bytes:
    """Return the content of a compressed reply. Raises EndlessReply if it is too large or damaged."""
    unpacker = zlib.decompressobj(GZIP)
    try:
        unpacked = unpacker.decompress(content, MOST_REPLY_BYTES)
    except zlib.error as error:
        raise EndlessReply(f"the reply is damaged: {error}") from error
    if unpacker.unconsumed_tail:
        raise EndlessReply(f"the reply has more than {MOST_REPLY_BYTES:,} bytes")
    return unpacked


def read_reply(request: JudgeRequest, body: Any) -> Reply:
    """Return the reply in the body of a response.

    If the body is not a chat completion, the reply has an error. Such a reply was paid for, too, so it counts as an
    invalid verdict. Except for the choices and their message, fields may be null, empty or missing. The content of a
    message may be missing only if the judge refuses. A field with a value of the wrong type is an error; the value is
    not converted to a string such as "None" or "5", because the judge did not write that.
    """
    reply = Reply(key=request.key, asked=request.id, id=None, text="", refusal=None, usage=_usage(body.get("usage")))
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
        message = server_message(body.get("error"))
        return attrs.evolve(reply, error=one_line(message or f"not a chat completion: {_describe(error)}"))


def server_message(error: Any) -> str | None:
    """Return the message of an error that a server sent as a string or as an object, or None if there is no error."""
    message = error.get("message") if isinstance(error, dict) else error
    if is_absent(message):
        return None if is_absent(error) else quoted(error)
    return message if isinstance(message, str) else quoted(error)


def _text(values: dict[str, Any], key: str) -> str | None:
    """Return the string under a key, or None if it is absent. Raises ValueError for a value of another type."""
    value = values.get(key)
    if is_absent(value):
        return None
    if not isinstance(value, str):
        raise ValueError(f"{key}: got {quoted(value)}, wanted a string")
    return value


def _describe(error: Exception) -> str:
    """Return what is wrong with a body that is not a chat completion."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error.args[-1]) if isinstance(error, ValueError) else "wanted an object with choices and a message"


def _usage(usage: Any) -> Usage | None:
    """Return the token counts of a reply; None if they cannot be right."""
    try:
        details = usage.get("prompt_tokens_details")
        details = {} if is_absent(details) else details
        counts: list[Any] = [details.get(name) for name in ("cached_tokens", "cache_write_tokens")]
        cached_input, cache_write = (0 if is_absent(count) else count for count in counts)
        input_tokens, output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not input_tokens or not output_tokens:
            return None
        return Usage(input=input_tokens, cached_input=cached_input, cache_write=cache_write, output=output_tokens)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _asked_pause(response: httpx2.Response) -> float:
    """Return the pause in seconds that the server asks for, at most a minute.

    The pause is 0 if the server asks for none, or if the time that it gives has passed.
    """
    retry_after = response.headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", retry_after, re.ASCII):
        return min(float(retry_after), LONGEST_ASKED_PAUSE_SECONDS)
    try:  # HTTP also allows a date, always in GMT
        seconds = (parsedate_to_datetime(retry_after) - datetime.now(timezone.utc)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_ASKED_PAUSE_SECONDS)


def _may_be_billed(response: httpx2.Response) -> bool:
    """Return whether a request that ended with this error may nevertheless have been processed and billed."""
    if response.status_code < 500:
        return response.status_code in GAVE_UP
    try:
        return response.status_code not in FAILED or not parse_json(response.content).get("error")
    except ValueError:
        return True
