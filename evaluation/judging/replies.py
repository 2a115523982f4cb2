"""Reader of judge replies: text, refusal, error and token counts from any server, one by one or in a batch.

Replies are read as plain JSON: servers leave out fields that the client library's types require.
"""

from typing import Any

from common.errors import printable
from evaluation.judging.store import Asked, Reply, Usage

MOST_TOKENS = 10_000_000  # of one reply; larger counts are invalid
MOST_CHARACTERS = 300  # of a server's message
ODD_SHAPE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def read_reply(asked: Asked, body: Any) -> Reply:
    """Return the content of a response or chat completion. A missing part is an empty text, an invalid verdict."""
    if isinstance(body, dict) and "choices" in body:
        finish = _at(body, "choices", 0, "finish_reason")
        texts, refusals = ([_at(body, "choices", 0, "message", name)] for name in ("content", "refusal"))
    else:
        finish = _at(body, "incomplete_details", "reason")
        messages = [item for item in _list(_at(body, "output")) if _at(item, "type") == "message"]
        parts = [part for message in messages for part in _list(_at(message, "content"))]
        texts = [_at(part, "text") for part in parts if _at(part, "type") == "output_text"]
        refusals = [_at(part, "refusal") or "refused" for part in parts if _at(part, "type") == "refusal"]
    if finish == "content_filter":
        refusals.append("content filter")
    text = "".join(_strings(texts))
    id, model = _at(body, "id"), _at(body, "model")
    return Reply(
        key=asked.key,
        id=id if isinstance(id, str) else None,
        text=text,
        refusal=next(map(one_line, filter(None, _strings(refusals))), None),
        usage=_usage(_at(body, "usage"), text),
        batch=asked.batch,
        asked=asked.id or None,
        model=one_line(model) if isinstance(model, str) else None,
        cut=finish in ("length", "max_output_tokens"),
        error=message_in(_at(body, "error")),
    )


def message_in(error: Any) -> str | None:
    """Return the message of a server's error in a line; None if there is none."""
    message = error.get("message") if isinstance(error, dict) else error
    return None if message is None or message == "" else one_line(str(message))


def one_line(text: str) -> str:
    """Return foreign text cut to a line that is safe to print."""
    return printable(" ".join(text[: 4 * MOST_CHARACTERS].split()))[:MOST_CHARACTERS]


def _at(value: Any, *path: str | int) -> Any:
    """Return the value at a path in JSON; None if there is none."""
    for step in path:
        try:
            value = value[step]
        except ODD_SHAPE:
            return None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(values: list[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _usage(usage: Any, text: str) -> Usage | None:
    """Return the token counts of either API; None if they cannot be right.

    Impossible counts of cached tokens are dropped: all input then counts at its full price, or at that of writing it
    into the cache if this is higher.
    """
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
