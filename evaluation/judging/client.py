"""A judge over the network: what is sent, what comes back, what can go wrong. `openai` speaks to any compatible server.

Replies are read as JSON here, the same whether they come one by one or in a batch: servers leave out fields that the
client library's own types have.
"""

import json
import os
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import attrs

from errors import BadInput
from evaluation.judging.prompt import RUBRIC, Judge, Prompt, prompt_key, read_verdict, verdict_schema
from evaluation.judging.verdicts import Reply, Usage, VerdictStore

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

OPENAI_URL = "https://api.openai.com/v1"
RETRIES = 6  # after the first try, by the client: it waits as long as Retry-After says, up to two minutes
CONNECT_SECONDS = 10.0
NAME = "verdict"
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # codes of 400: this prompt, not others
NOT_TAKEN = (400, 413, 422)  # this prompt, if others are answered: it may be too long
NEVER_MENDED = (401, 403, 404, 405)  # by asking again
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not mend
PATHS = {"responses": "/responses", "chat": "/chat/completions"}


@attrs.frozen(kw_only=True)
class Request:
    """A prompt, ready to be sent to a judge."""

    key: str
    answers: int
    body: dict[str, Any]


class NoReply(Exception):
    """The server could not be reached, or was out of order, again and again."""


class NotTaken(NoReply):
    """The server finds fault with this request; perhaps with all."""


def make_request(judge: Judge, prompt: Prompt) -> Request:
    """Return what is sent for a prompt. Neither temperature nor seed: newer models answer them with an error."""
    answers = len(prompt.order)
    form = {"name": NAME, "strict": True, "schema": verdict_schema(answers)}
    body: dict[str, Any] = {"model": judge.model}
    if judge.api == "responses":
        body |= {"instructions": RUBRIC, "input": prompt.text, "store": False}
        body |= {"text": {"format": {"type": "json_schema", **form}}}
        body |= {} if judge.effort is None else {"reasoning": {"effort": judge.effort}}
    else:
        body["messages"] = [{"role": "system", "content": RUBRIC}, {"role": "user", "content": prompt.text}]
        body |= {"response_format": {"type": "json_schema", "json_schema": form}}
        body |= {} if judge.effort is None else {"reasoning_effort": judge.effort}
    return Request(key=prompt_key(judge, prompt), answers=answers, body=body)


def verdict_in(replies: list[Reply], answers: int) -> tuple[int, ...] | None:
    """Return the scores of the first right verdict, by position."""
    right = (reply for reply in replies if problem_in(reply, answers) is None)
    return next((read_verdict(reply.text, answers) for reply in right), None)


def problem_in(reply: Reply, answers: int) -> str | None:
    """Return what is wrong with a verdict; None for a right one."""
    try:
        read_verdict(reply.text, answers)
    except ValueError as error:
        return str(error)
    return None


def is_settled(store: VerdictStore, request: Request) -> bool:
    """Tell whether nothing is left to ask: there is a verdict, or a refusal."""
    replies = store.replies.get(request.key, [])
    return any(reply.refusal is not None for reply in replies) or verdict_in(replies, request.answers) is not None


def open_client(base_url: str, timeout_seconds: float) -> "AsyncOpenAI":
    """Return a client. Raises BadInput where OpenAI would be asked without a key, or nobody answers at all."""
    from openai import AsyncOpenAI

    key = find_key(base_url)
    _check_answers(base_url)
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout_seconds, max_retries=RETRIES)


def find_key(base_url: str) -> str | None:
    """Return the key of the provider. Raises BadInput where OpenAI would be asked without one."""
    key = os.environ.get("OPENAI_API_KEY") or None
    if key is None and base_url == OPENAI_URL:
        raise BadInput("OPENAI_API_KEY: not set; set it to a key of the provider, or pass --base-url of another server")
    return key


async def ask(client: "AsyncOpenAI", judge: Judge, request: Request, attempt: int) -> Reply:
    """Return the judge's reply to a request. `attempt`: how often it has been answered before.

    Raises NoReply when there is none, NotTaken where the prompt may be why, BadInput when no request would be
    answered. A server that knows the header Idempotency-Key answers a repeated request with the reply that it has
    billed already.
    """
    from openai import APIConnectionError, APIStatusError

    resource = client.responses if judge.api == "responses" else client.chat.completions
    headers = {"Idempotency-Key": f"{request.key}-{attempt}"}
    for _ in range(2):
        try:
            # Said because transformers serve streams responses unless told otherwise.
            raw = await resource.with_raw_response.create(**request.body, stream=False, extra_headers=headers)
            return read_reply(request.key, json.loads(raw.text))
        except APIStatusError as error:
            if (refusal := _refusal(error)) is not None:
                return Reply(key=request.key, id=None, text="", refusal=refusal, usage=None, batch=False)
            if error.status_code in NOT_TAKEN:
                raise NotTaken(explained(error)) from error
            if error.status_code in NEVER_MENDED or error.code == NO_CREDIT:
                hint = "; has it the Responses API? --api chat asks by the other" if error.status_code == 404 else ""
                raise BadInput(f"{judge.base_url}: {explained(error)}{hint}") from error
            raise NoReply(explained(error)) from error
        except APIConnectionError as error:
            raise NoReply(explained(error)) from error
        except ValueError:
            continue  # half a reply: as often as the client tries, the server may be at fault
    raise NoReply("replies that are not JSON")


def read_reply(key: str, body: dict[str, Any], *, batch: bool = False) -> Reply:
    """Return what a response or chat completion says. What is not there reads as an empty text, a wrong verdict."""
    try:
        text, refusal = _said_in_chat(body) if "choices" in body else _said_in_response(body)
        id, usage = body.get("id"), _usage(body.get("usage"))
    except (AttributeError, TypeError):
        id, text, refusal, usage = None, "", None, None
    return Reply(key=key, id=id, text=text, refusal=refusal, usage=usage, batch=batch)


def explained(error: Exception) -> str:
    """Return what the server or the network says, in a line."""
    body, status = getattr(error, "body", None), getattr(error, "status_code", None)
    said = body.get("message") if isinstance(body, dict) else None
    if said:
        return f"{status}: {' '.join(str(said).split())[:300]}"
    cause = "" if error.__cause__ is None else f": {error.__cause__}"
    return " ".join(f"{error}{cause}".split())[:300]


def _check_answers(base_url: str) -> None:
    """Raise BadInput where no server of one's own listens: the client would try for a minute before it said so."""
    url = urlsplit(base_url)
    if url.scheme == "http" and not getproxies():
        try:
            socket.create_connection((url.hostname or "", url.port or 80), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise BadInput(f"{base_url}: no server: {error}; start it, or pass another --base-url") from error


def _refusal(error: "APIStatusError") -> str | None:
    return explained(error) if error.status_code == 400 and error.code in REFUSED else None


def _said_in_response(body: dict[str, Any]) -> tuple[str, str | None]:
    """Return text and refusal of the Responses API."""
    parts = [
        part for item in body.get("output") or [] if item.get("type") == "message" for part in item.get("content") or []
    ]
    text = "".join(part.get("text") or "" for part in parts if part.get("type") == "output_text")
    refused = [part.get("refusal") or "refused" for part in parts if part.get("type") == "refusal"]
    if (body.get("incomplete_details") or {}).get("reason") == "content_filter":
        refused.append("content filter")
    return text, refused[0] if refused else None


def _said_in_chat(body: dict[str, Any]) -> tuple[str, str | None]:
    """Return text and refusal of a chat completion."""
    choice = (body["choices"] or [{}])[0]
    message = choice.get("message") or {}
    filtered = "content filter" if choice.get("finish_reason") == "content_filter" else None
    return message.get("content") or "", message.get("refusal") or filtered


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    """Return the counts of either interface, which have other names for the same; None where they are none."""
    if not usage:
        return None
    try:
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        return Usage(
            input=int(usage.get("input_tokens", usage.get("prompt_tokens")) or 0),
            cached_input=int(details.get("cached_tokens") or 0),
            cache_write=int(details.get("cache_write_tokens") or 0),
            output=int(usage.get("output_tokens", usage.get("completion_tokens")) or 0),
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
