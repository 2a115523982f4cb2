"""Judge requests: one sending by the openai client, and the outcomes that are no reply."""

import math
from email.utils import parsedate_to_datetime
from enum import Enum
from time import time
from typing import Any

import attrs
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from common.json_files import parse_json
from evaluation.judging.client import UNSENT
from evaluation.judging.replies import message_in, one_line, read_reply
from evaluation.judging.store import Asked, Reply, Usage

RETRIES = 6  # of a request that was not billed
MOST_WAIT = 120.0  # seconds that Retry-After is obeyed
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # error codes: this prompt, not others
NOT_TAKEN = (400, 413, 422)  # this prompt, if others are answered: it may be too long
UNUSABLE = (401, 402, 403, 404, 405)  # the same for every request, and for a repeated one
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not end
# An API's own error was not billed. A 502, a 504 or a gateway's page says nothing of the API behind it.
FAILED = (500, 503, 529)
GAVE_UP = (408, 425, 499)  # a gateway's timeout: the API behind it may go on, and bill
PATHS = {"responses": "/responses", "chat": "/chat/completions"}
UNBILLED = Usage(input=0, output=0)


class Failure(Enum):
    """Outcome of a request that is no reply."""

    LOST = "may have been billed"
    FAILED = "not billed, may be retried"
    NOT_TAKEN = "not billed; the server rejects this prompt, or all"
    UNUSABLE = "not billed; the server rejects every request"


class NoReply(Exception):
    """A request has ended without a reply that can be stored."""

    def __init__(self, why: str, failure: Failure, wait_seconds: float | None = None):
        """`wait_seconds`: the server's Retry-After."""
        super().__init__(why)
        self.failure = failure
        self.wait_seconds = wait_seconds


async def send(client: AsyncOpenAI, api: str, body: dict[str, Any], asked: Asked, attempt: str) -> Reply:
    """Send a request once and return the judge's reply. `attempt`: tells repeated requests from new ones.

    Raises NoReply if there is none. A server that knows the header Idempotency-Key answers a repeated request with the
    reply that it has billed already.
    """
    resource = client.responses if api == "responses" else client.chat.completions
    headers = {"Idempotency-Key": f"{asked.key}-{attempt}", "X-Client-Request-Id": asked.id}
    try:
        # stream=False is explicit: transformers serve streams responses by default
        raw = await resource.with_raw_response.create(**body, stream=False, extra_headers=headers)
    except APIStatusError as error:
        failure = Failure.LOST if may_be_done(error) else Failure.FAILED
        said = NoReply(explained(error), failure, _retry_after(error.response.headers.get("retry-after")))
        return refusal_of(asked, error.status_code, error.code, said)
    except APIConnectionError as error:
        unsent = isinstance(error.__cause__, UNSENT)
        raise NoReply(explained(error), Failure.FAILED if unsent else Failure.LOST) from error
    try:
        return read_reply(asked, parse_json(raw.text, None, unique=False))  # paid for, so duplicate keys are accepted
    except ValueError as error:
        raise NoReply(f"half a reply, or none: {error}", Failure.LOST) from error


def refusal_of(asked: Asked, status: Any, code: Any, otherwise: NoReply) -> Reply:
    """Return the refusal that an error with this status and code is. Raises NoReply for any other error."""
    why = str(otherwise)
    if code in REFUSED:
        refusal = read_reply(asked, None)
        return attrs.evolve(refusal, refusal=why, usage=UNBILLED)
    if status in NOT_TAKEN:
        raise NoReply(why, Failure.NOT_TAKEN)
    if status in UNUSABLE or (isinstance(status, int) and status < 400) or code == NO_CREDIT:
        hint = "; does it have the Responses API? --api chat uses the other one" if status == 404 else ""
        raise NoReply(why + hint, Failure.UNUSABLE)
    raise otherwise


def may_be_done(error: APIStatusError) -> bool:
    """Tell whether a request with this status may have been done, and billed, all the same."""
    of_the_api = isinstance(error.body, dict) and error.status_code in FAILED
    return error.status_code in GAVE_UP or (error.status_code >= 500 and not of_the_api)


def explained(error: Exception) -> str:
    """Return the message of the server or the network in a line."""
    if isinstance(error, APIStatusError):
        if 300 <= error.status_code < 400 and "location" in error.response.headers:
            return f"{error.status_code}: redirects are not followed; pass the final address as --base-url"
        return f"{error.status_code}: {message_in(error.body) or one_line(str(error))}"
    cause = "" if error.__cause__ is None else f": {error.__cause__}"
    return one_line(f"{error}{cause}")


def _retry_after(value: Any) -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date; None for anything else."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MOST_WAIT) if math.isfinite(seconds) else None
