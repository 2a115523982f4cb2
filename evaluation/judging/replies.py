"""Outcomes of judge requests: replies of any server, one by one or in a batch, refusals and failures.

Replies are read as plain JSON: servers leave out fields that the client library's types require.
"""

from enum import Enum
from typing import Any

import attrs

from common.errors import printable
from common.json_files import parse_json
from evaluation.judging.store import Asked, Reply, Usage

MOST_TOKENS = 10_000_000  # of one reply; larger counts are invalid
MOST_CHARACTERS = 300  # of a server's message
REFUSED = ("content_filter", "content_policy_violation", "invalid_prompt")  # error codes: this prompt, not others
NOT_TAKEN = (400, 413, 422)  # this prompt, if others are answered: it may be too long
UNUSABLE = (401, 402, 403, 404, 405)  # the same for every request, and for a repeated one
NO_CREDIT = "insufficient_quota"  # a 429 that waiting does not end
UNBILLED = Usage(input=0, output=0)
ODD_SHAPE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


class Failure(Enum):
    """Outcome of a request that is no reply."""

    LOST = "may have been billed"
    FAILED = "not billed, may be retried"
    NOT_TAKEN = "not billed; the server rejects this prompt, or all"
    UNUSABLE = "not billed; the server rejects every request"


@attrs.frozen
class NoReply:
    """End of a request without a reply that can be stored."""

    why: str
    failure: Failure
    wait_seconds: float | None = None  # the server's Retry-After


def outcome_of_error(asked: Asked, status: Any, code: Any, otherwise: NoReply) -> Reply | NoReply:
    """Return a refusal, or the failure that an error with this status and code is; `otherwise` for any other error."""
    if code in REFUSED:
        return attrs.evolve(read_reply(asked, None), refusal=otherwise.why, usage=UNBILLED)
    if status in NOT_TAKEN:
        return NoReply(otherwise.why, Failure.NOT_TAKEN)
    if status in UNUSABLE or (isinstance(status, int) and status < 400) or code == NO_CREDIT:
        hint = "; does it have the Responses API? --api chat uses the other one" if status == 404 else ""
        return NoReply(otherwise.why + hint, Failure.UNUSABLE)
    return otherwise


def read_reply(asked: Asked, body: Any) -> Reply:
    """Return the content of a response or chat completion. A missing part is an empty text, an invalid verdict."""
    if isinstance(body, dict) and "choices" in body:
        finish = _at(body, str, "choices", 0, "finish_reason")
        texts, refusals = ([_at(body, str, "choices", 0, "message", name)] for name in ("content", "refusal"))
    else:
        finish = _at(body, str, "incomplete_details", "reason")
        messages = [item for item in _at(body, list, "output") or [] if _at(item, str, "type") == "message"]
        parts = [part for message in messages for part in _at(message, list, "content") or []]
        texts = [_at(part, str, "text") for part in parts if _at(part, str, "type") == "output_text"]
        refusals = [_at(part, str, "refusal") or "refused" for part in parts if _at(part, str, "type") == "refusal"]
    if finish == "content_filter":
        refusals.append("content filter")
    text = "".join(filter(None, texts))
    model = _at(body, str, "model")
    return Reply(
        key=asked.key,
        id=_at(body, str, "id"),
        text=text,
        refusal=next(map(one_line, filter(None, refusals)), None),
        usage=_usage(_at(body, dict, "usage"), text),
        batch=asked.batch,
        asked=asked.id or None,
        model=None if model is None else one_line(model),
        cut=finish in ("length", "max_output_tokens"),
        error=message_in(_at(body, object, "error")),
    )


def read_batch_line(line: str, by_key: dict[str, Asked]) -> tuple[Asked, Reply | NoReply] | None:
    """Return the request and its outcome in a line of a batch's output; None if it cannot be read."""
    try:
        row = parse_json(line, unique=False)  # paid for, so duplicate keys are accepted
        asked, response = by_key[row["custom_id"]], row.get("response") or {}
        status, body = response.get("status_code"), response.get("body")
    except ODD_SHAPE:
        return None
    if status == 200:
        return asked, read_reply(asked, body)
    error = row.get("error") or _at(body, object, "error")
    if status is None and error is None:
        return None
    said = [part for part in (status and one_line(str(status)), message_in(error)) if part]
    failed = NoReply(": ".join(said), Failure.FAILED)  # errors in a batch's output are not billed
    return asked, outcome_of_error(asked, status, _at(error, object, "code"), failed)


def message_in(error: Any) -> str | None:
    message = error.get("message") if isinstance(error, dict) else error
    return None if message is None or message == "" else one_line(str(message))


def one_line(text: str) -> str:
    """Return foreign text cut to a line that is safe to print."""
    return printable(" ".join(text[: 4 * MOST_CHARACTERS].split()))[:MOST_CHARACTERS]


def _at(value: Any, kind: type, *path: str | int) -> Any:
    """Return the value at a path in JSON; None if there is none of this kind."""
    for step in path:
        try:
            value = value[step]
        except ODD_SHAPE:
            return None
    return value if isinstance(value, kind) else None


def _usage(usage: Any, text: str) -> Usage | None:
    """Return the token counts of either API; None if they cannot be right. Impossible cached ones count as written."""
    try:
        counted = _tokens(usage.get("input_tokens", usage.get("prompt_tokens")))
        output = _tokens(usage.get("output_tokens", usage.get("completion_tokens")))
    except ODD_SHAPE:
        return None
    if counted == 0 or (text and output == 0):  # no prompt and no text is free of tokens: the server does not count
        return None
    try:
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        cached, written = (_tokens(details.get(name) or 0) for name in ("cached_tokens", "cache_write_tokens"))
        return Usage(input=counted, cached_input=cached, cache_write=written, output=output)
    except ODD_SHAPE:
        return Usage(input=counted, cached_input=0, cache_write=counted, output=output)


def _tokens(value: Any) -> int:
    count = int(value)
    if not 0 <= count <= MOST_TOKENS or count != float(value):
        raise ValueError(f"got {value}, wanted a number of tokens")
    return count
