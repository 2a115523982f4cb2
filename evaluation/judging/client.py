"""Requests to a judge: what is sent, and how each can end. `openai` speaks to any compatible server."""

import math
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

import attrs

from common.json_files import parse_json
from evaluation.judging.prompt import RUBRIC, Judge, Prompt, prompt_key, read_verdict, verdict_schema
from evaluation.judging.replies import message_in, one_line, read_reply
from evaluation.judging.verdicts import Asked, Reply, Usage, VerdictStore

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

NAME = "verdict"
TRIES = 2  # of a prompt whose first verdict is wrong
MOST_WAIT = 120.0  # seconds, of those that Retry-After names
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # codes of 400: this prompt, not others
NOT_TAKEN = (400, 413, 422)  # this prompt, if others are answered: it may be too long
UNUSABLE = (401, 402, 403, 404, 405)  # the same for every request, and for a repeated one
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not end
# What an API says of itself was not billed. A 502, 504 or page of a gateway says nothing of the API behind it.
FAILED = (500, 503, 529)
GAVE_UP = (408, 425, 499)  # a gateway's words for too late: what is behind it may go on, and bill
PATHS = {"responses": "/responses", "chat": "/chat/completions"}
UNBILLED = Usage(input=0, output=0)


@attrs.frozen(kw_only=True)
class JudgeRequest:
    """A prompt, ready to be sent to a judge."""

    key: str
    answers: int
    body: dict[str, Any]  # less the limit of output, which a repeated request may change


class NoReply(Exception):
    """A request has ended without a reply that can be kept."""

    def __init__(self, why: str, *, maybe_billed: bool = False, wait_seconds: float | None = None):
        """`maybe_billed`: the server may have answered and billed it; `wait_seconds`: what it says in Retry-After."""
        super().__init__(why)
        self.maybe_billed = maybe_billed
        self.wait_seconds = wait_seconds


class NotTaken(NoReply):
    """The server finds fault with this request; perhaps with all."""


class Unusable(NoReply):
    """The server answers no request like this."""


def make_request(judge: Judge, prompt: Prompt) -> JudgeRequest:
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
    return JudgeRequest(key=prompt_key(judge, prompt), answers=answers, body=body)


def limited(request: JudgeRequest, judge: Judge, most_output: int) -> dict[str, Any]:
    """Return the body of a request whose reply has at most so many tokens, thoughts included."""
    name = "max_output_tokens" if judge.api == "responses" else "max_completion_tokens"
    return {**request.body, name: most_output}


def verdict_in(replies: list[Reply], answers: int) -> tuple[float, ...] | None:
    """Return the scores of the first right verdict, by position."""
    right = (reply for reply in replies if problem_in(reply, answers) is None)
    return next((read_verdict(reply.text, answers) for reply in right), None)


def problem_in(reply: Reply, answers: int) -> str | None:
    """Return what is wrong with a verdict; None for a right one."""
    if reply.error is not None:
        return f"the server says: {reply.error}"
    try:
        read_verdict(reply.text, answers)
    except ValueError as error:
        return str(error)
    return None


def is_settled(store: VerdictStore, request: JudgeRequest, tries: int = TRIES) -> bool:
    """Tell whether nothing is left to ask: there is a verdict, a refusal, or `tries` wrong verdicts."""
    replies = store.replies.get(request.key, [])
    return (
        len(replies) >= tries
        or any(reply.refusal is not None for reply in replies)
        or verdict_in(replies, request.answers) is not None
    )


async def ask(client: "AsyncOpenAI", judge: Judge, body: dict[str, Any], asked: Asked, attempt: str) -> Reply:
    """Send a request once and return the judge's reply. `attempt`: what tells repeated requests from new ones.

    Raises NoReply when there is none, NotTaken where the prompt may be why, Unusable when no request would be answered.
    A server that knows the header Idempotency-Key answers a repeated request with the reply that it has billed already.
    """
    from openai import APIConnectionError, APIStatusError

    from evaluation.judging.transport import UNSENT

    resource = client.responses if judge.api == "responses" else client.chat.completions
    headers = {"Idempotency-Key": f"{asked.key}-{attempt}", "X-Client-Request-Id": asked.id}
    try:
        # stream: said because transformers serve streams responses unless told otherwise
        raw = await resource.with_raw_response.create(**body, stream=False, extra_headers=headers)
    except APIStatusError as error:
        return _refusal(error, asked)
    except APIConnectionError as error:
        raise NoReply(explained(error), maybe_billed=not isinstance(error.__cause__, UNSENT)) from error
    try:
        reply = parse_json(raw.text, None, unique=False)  # it is paid for, however it is spelled
    except ValueError as error:
        raise NoReply(f"half a reply, or none: {error}", maybe_billed=True) from error
    return read_reply(asked.key, reply, asked=asked.id)


def maybe_done(error: "APIStatusError") -> bool:
    """Tell whether a request with this status may have been done, and billed, all the same."""
    says_itself = isinstance(error.body, dict) and error.status_code in FAILED
    return error.status_code in GAVE_UP or (error.status_code >= 500 and not says_itself)


def explained(error: Exception) -> str:
    """Return what the server or the network says, in a line."""
    from openai import APIStatusError

    if isinstance(error, APIStatusError):
        location = error.response.headers.get("location")
        if location is not None and 300 <= error.status_code < 400:
            return f"{error.status_code}: it redirects, which is not followed; pass the final address as --base-url"
        return f"{error.status_code}: {message_in(error.body) or one_line(str(error))}"
    cause = "" if error.__cause__ is None else f": {error.__cause__}"
    return one_line(f"{error}{cause}")


def _refusal(error: "APIStatusError", asked: Asked) -> Reply:
    """Return the refusal that an error status is. Raises what else it is."""
    status, why = error.status_code, explained(error)
    if status == 400 and error.code in REFUSED:
        return Reply(key=asked.key, id=None, text="", refusal=why, usage=UNBILLED, batch=False, asked=asked.id)
    if status in NOT_TAKEN:
        raise NotTaken(why) from error
    if status in UNUSABLE or status < 400 or error.code == NO_CREDIT:
        hint = "; has it the Responses API? --api chat asks by the other" if status == 404 else ""
        raise Unusable(why + hint) from error
    raise NoReply(why, maybe_billed=maybe_done(error), wait_seconds=_retry_after(error.response.headers)) from error


def _retry_after(headers: Any) -> float | None:
    """Return the seconds of a header Retry-After, which has seconds or a date; None where it has neither."""
    said = headers.get("retry-after")
    try:
        seconds = float(said)
    except (TypeError, ValueError):
        try:
            seconds = parsedate_to_datetime(said).timestamp() - time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MOST_WAIT) if math.isfinite(seconds) else None
