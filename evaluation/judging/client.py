"""Requests to a judge by OpenAI's client, each reserved in the budget before it leaves, retries included."""

import asyncio
import random
import re
import signal
from contextlib import suppress
from typing import Any

import attrs
import httpx2
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from tqdm import tqdm

from common.errors import BadInput, say
from common.json_files import parse_json
from evaluation.judging.judgement import Judgement, PromptVerdict, one_line
from evaluation.judging.prompt import Prompt
from evaluation.judging.store import Asked, Reply, Usage, money

RETRIES, LONGEST_PAUSE_SECONDS = 6, 8.0  # of a request
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # error codes: this prompt, not others
REJECTED = (400, 413, 422)  # this prompt, if others are answered: it may be too long
UNUSABLE = (401, 402, 403, 404, 405)  # the same for every request, and for a repeated one
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not end
GAVE_UP = (408, 409, 425, 499)  # a gateway's timeout: the API behind it may go on, and bill
RETRIED = (*GAVE_UP, 429)  # as 500 and more
FAILED = (500, 503, 529)  # not billed if the API says so itself; other statuses say nothing of the API behind a gateway
UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.LocalProtocolError, httpx2.PoolTimeout, httpx2.ProxyError)


class Asker:
    """Requests of a session: one at a time, which shows their cost, one more with each verdict, up to --concurrency."""

    def __init__(self, judgement: Judgement, key: str):
        self._judgement, self._options, self._key = judgement, judgement.options, key
        url, timeout = judgement.judge.base_url, judgement.options.timeout
        http = DefaultAsyncHttpxClient(follow_redirects=False)
        self._client = AsyncOpenAI(
            api_key=key or "none", base_url=url, timeout=timeout, max_retries=0, http_client=http
        )
        self._slots, self._at_once = asyncio.Semaphore(1), 1
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
        say("stopping: waiting for requests in flight; press Ctrl-C again to abandon them")

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
                if judgement.take(outcome) and self._at_once < self._options.concurrency:
                    self._at_once += 1
                    self._slots.release()
        except Exception as error:  # noqa: BLE001  # the other prompts' replies are paid for: keep them
            judgement.fail(error)
        bar.set_postfix_str(money(judgement.cost.usd))
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
                return read_reply(asked, parse_json(self._hidden(raw.http_response.text), unique=False))
            except APIConnectionError as error:
                failure, pause = PromptVerdict("missing", one_line(f"{error}: {error.__cause__}")), 0.0
                self._note_lost(asked, error.__cause__)
            except APIStatusError as error:
                self._reached, failure = True, self._explained(error, asked)
                if not _may_be_billed(error.response):
                    judgement.release(asked, f"status {error.status_code}")
                again = error.status_code in RETRIED or error.status_code >= 500
                if isinstance(failure, Reply) or not again or attempt == RETRIES:
                    break
                pause = _asked_pause(error.response)
            except ValueError as error:
                failure = PromptVerdict("missing", f"half a reply, or none: {error}")
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
        if isinstance(cause, UNSENT):
            judgement.release(asked, str(cause))
            if not self._reached:
                url = judgement.judge.base_url
                judgement.fail(BadInput(f"{url}: no server: {cause}; start it, or pass another --base-url"))

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


def _asked_pause(response: httpx2.Response) -> float:
    """Return the seconds that a server asks to wait, a minute at most; 0: it does not."""
    asked = response.headers.get("Retry-After", "")
    return min(float(asked), 60.0) if re.fullmatch(r"\d+(\.\d+)?", asked, re.ASCII) else 0.0


def _may_be_billed(response: httpx2.Response) -> bool:
    """Tell whether a request that ended with this error may have been done, and billed, all the same."""
    if response.status_code < 500:
        return response.status_code in GAVE_UP
    try:
        return response.status_code not in FAILED or not parse_json(response.content).get("error")
    except ValueError:
        return True
