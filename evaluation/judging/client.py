"""Requests to a judge through OpenAI's client, each reserved in the budget before it leaves, retries included."""

import asyncio
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import attrs
import httpx2
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError
from tqdm import tqdm

from common.errors import BadInput
from common.json_files import parse_json
from evaluation.judging.judgement import Judgement, PromptVerdict, one_line
from evaluation.judging.prompt import Prompt
from evaluation.judging.store import Asked, Reply, Usage, money

RETRIES = 6  # of a request, by OpenAI's client
KEY, ID = "Idempotency-Key", "X-Client-Request-Id"
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # error codes: this prompt, not others
REJECTED = (400, 413, 422)  # this prompt, if others are answered: it may be too long
UNUSABLE = (401, 402, 403, 404, 405)  # the same for every request, and for a repeated one
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not end
GAVE_UP = (408, 409, 425, 499)  # a gateway's timeout: the API behind it may go on, and bill
FAILED = (500, 503, 529)  # not billed if the API says so itself; other statuses say nothing of the API behind a gateway
UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.LocalProtocolError, httpx2.PoolTimeout, httpx2.ProxyError)


class NotSentError(OpenAIError):
    """Nothing more is to be sent. OpenAI's client passes its own errors on, and retries after all others."""


class BudgetedClient(httpx2.AsyncClient):
    """HTTP client that stores the largest cost of each request before it is sent, and the end of unbilled ones."""

    def __init__(self, judgement: Judgement):
        super().__init__()  # redirects are not followed
        self._judgement, self._reached = judgement, False
        self.asked: dict[str, Asked] = {}  # by Idempotency-Key, without the id of a sending

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and return its response, read to the end. Raises httpx2.TransportError and NotSentError."""
        judgement, asked = self._judgement, attrs.evolve(self.asked[request.headers[KEY]], id=uuid.uuid4().hex)
        request.headers[ID] = asked.id
        try:
            if not judgement.reserve(asked):
                raise NotSentError
            response = await super().send(request, **options)
            self._reached = True
            if response.is_error and not _may_be_billed(response):
                judgement.release(asked, f"status {response.status_code}")
        except httpx2.TransportError as error:
            judgement.unanswered_in_a_row += 1
            if not isinstance(error, UNSENT):
                raise
            judgement.release(asked, str(error))
            if self._reached:
                raise
            url = judgement.judge.base_url
            judgement.fail(BadInput(f"{url}: no server: {error}; start it, or pass another --base-url"))
            raise NotSentError from error
        except BadInput as error:  # of the store
            judgement.fail(error)
            raise NotSentError from error
        return response


class Asker:
    """Requests of a session: one at a time, one more with each verdict, up to --concurrency.

    The first replies show what the next ones cost, and whether the judge is usable at all.
    """

    def __init__(self, judgement: Judgement, key: str):
        self._judgement, self._options = judgement, judgement.options
        self._http, self._key = BudgetedClient(judgement), key
        url, timeout = judgement.judge.base_url, judgement.options.timeout
        self._client = AsyncOpenAI(
            api_key=key or "none", base_url=url, timeout=timeout, max_retries=RETRIES, http_client=self._http
        )
        self._slots, self._at_once = asyncio.Semaphore(1), 1

    async def ask(self) -> None:
        """Send what is outstanding. `judgement.fatal` takes errors, `judgement.interrupted` a signal.

        The first SIGINT, SIGTERM or SIGHUP stops sending, the second waiting.
        """
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
                        waiting = iter(prompts)
                        workers = min(self._options.concurrency, len(prompts))
                        await asyncio.gather(*(self._work(waiting, bar) for _ in range(workers)))
                    if judgement.over_budget is None:
                        return

    def _stop(self, task: asyncio.Task[None]) -> None:
        if self._judgement.interrupted.is_set():
            task.cancel()
            return
        self._judgement.interrupted.set()
        print("stopping: waiting for requests in flight; press Ctrl-C again to abandon them", file=sys.stderr)

    async def _work(self, waiting: Iterator[Prompt], bar: tqdm) -> None:
        for prompt in waiting:
            if self._judgement.stopping:
                return
            try:
                await self._ask(prompt)
            except Exception as error:  # noqa: BLE001  # the other workers' replies are paid for: keep them
                self._judgement.fail(error)
            bar.set_postfix_str(money(self._judgement.cost.usd))
            bar.update()

    async def _ask(self, prompt: Prompt) -> None:
        """Ask a prompt until it is settled, it fails, or nothing more is to be sent."""
        judgement = self._judgement
        while not judgement.is_settled(prompt):
            async with self._slots:
                outcome = None if judgement.stopping else await self._send(prompt)
            if isinstance(outcome, PromptVerdict):
                judgement.failed[prompt.key] = outcome
            if not isinstance(outcome, Reply):
                return
            if judgement.take(outcome) and self._at_once < self._options.concurrency:
                self._at_once += 1
                self._slots.release()

    async def _send(self, prompt: Prompt) -> Reply | PromptVerdict | None:
        """Return the reply to a request, or its failure; None: nothing more is to be sent."""
        judgement = self._judgement
        asked, body = judgement.request(prompt)
        # A server that knows this header answers a repeated request with the reply that it has billed already.
        key = f"{asked.key}-{len(judgement.store.prompts[prompt.key].replies)}-{asked.limit}"
        self._http.asked[key] = asked
        try:
            raw = await self._client.chat.completions.with_raw_response.create(**body, extra_headers={KEY: key})
            asked = attrs.evolve(asked, id=raw.http_response.request.headers[ID])
            return read_reply(asked, parse_json(self._hidden(raw.http_response.text), unique=False))
        except NotSentError:
            return None
        except APIConnectionError as error:
            return PromptVerdict("missing", one_line(f"{error}: {error.__cause__}"))
        except APIStatusError as error:
            judgement.unanswered_in_a_row += 1
            return self._explained(error, attrs.evolve(asked, id=error.request.headers[ID]))
        except ValueError as error:
            judgement.unanswered_in_a_row += 1
            return PromptVerdict("missing", f"half a reply, or none: {error}")

    def _explained(self, error: APIStatusError, asked: Asked) -> Reply | PromptVerdict:
        """Return the refusal or failure that an error is; one that all requests would get ends the session."""
        said = error.body.get("message") if isinstance(error.body, dict) else None
        why = f"{error.status_code}: {one_line(self._hidden(str(said or error)))}"
        if error.code in REFUSED:
            return Reply(key=asked.key, asked=asked.id, id=None, text="", refusal=why, usage=Usage(input=0, output=0))
        if error.status_code in UNUSABLE or error.status_code < 400 or error.code == NO_CREDIT:
            self._judgement.fail(BadInput(f"{self._judgement.judge.base_url}: {why}"))
        return PromptVerdict("not taken" if error.status_code in REJECTED else "missing", why)

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "[secret]") if self._key else text


def read_reply(asked: Asked, body: Any) -> Reply:
    """Return the content of a chat completion. One of another form is paid for as well: an invalid verdict."""
    reply = Reply(key=asked.key, asked=asked.id, id=None, text="", refusal=None, usage=_usage(body.get("usage")))
    try:
        [choice, *_] = body["choices"]
        message, finish = choice["message"], choice["finish_reason"]
        refusal = message.get("refusal") or ("content filter" if finish == "content_filter" else None)
        return attrs.evolve(
            reply,
            id=str(body["id"]),
            text=str(message["content"] or ""),
            refusal=None if refusal is None else one_line(str(refusal)),
            model=one_line(str(body["model"])),
            cut=finish == "length",
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return attrs.evolve(reply, error=one_line(str(body.get("error") or f"no chat completion: {error!r}")))


def _usage(usage: Any) -> Usage | None:
    """Return the token counts of a reply; None if they cannot be right."""
    try:
        details = usage.get("prompt_tokens_details") or {}
        cached, written = (details.get(name) or 0 for name in ("cached_tokens", "cache_write_tokens"))
        read, said = usage["prompt_tokens"], usage["completion_tokens"]
        return Usage(input=read, cached_input=cached, cache_write=written, output=said) if read and said else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _may_be_billed(response: httpx2.Response) -> bool:
    """Tell whether a request that ended with this error may have been done, and billed, all the same."""
    if response.status_code < 500:
        return response.status_code in GAVE_UP
    try:
        of_the_api = response.status_code in FAILED and bool(parse_json(response.content).get("error"))
    except ValueError:
        of_the_api = False
    return not of_the_api
