"""Replies of a judge, from any server: text, refusal, error message and token counts, whatever their JSON looks like.

Replies are read as JSON here, the same whether they come one by one or in a batch: servers leave out fields that the
client library's own types have.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from common.errors import printable
from evaluation.judging.verdicts import Reply, Usage

MOST_TOKENS = 10_000_000  # of one reply; larger counts are no counts
MOST_CHARACTERS = 300  # of a server's message
SHAPES = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)  # what an odd shape raises
Read = TypeVar("Read")


def read_reply(key: str, body: Any, *, asked: str | None = None, batch: bool = False) -> Reply:
    """Return what a response or chat completion says. What is not there reads as an empty text, a wrong verdict."""
    text, refusal = _read(lambda: _said_in_chat(body) if "choices" in body else _said_in_response(body)) or ("", None)
    usage = _read(lambda: _usage(body["usage"]))
    if usage is not None and (usage.input == 0 or (text and usage.output == 0)):
        usage = None  # no prompt and no text is free of tokens: the server does not count
    return Reply(
        key=key,
        id=_read(lambda: _text(body["id"])),
        text=text,
        refusal=refusal,
        usage=usage,
        batch=batch,
        asked=asked,
        model=_read(lambda: one_line(_text(body["model"]))),
        cut=bool(_read(lambda: _is_cut(body))),
        error=_read(lambda: message_in(body["error"])),
    )


def message_in(error: Any) -> str | None:
    """Return the message of a server's error in a line; None where there is none."""
    said = error.get("message") if isinstance(error, dict) else error
    return None if said is None or said == "" else one_line(str(said))


def one_line(text: str) -> str:
    """Return foreign text cut to a line that is safe to print."""
    return printable(" ".join(text[: 4 * MOST_CHARACTERS].split()))[:MOST_CHARACTERS]


def _read(read: Callable[[], Read]) -> Read | None:
    try:
        return read()
    except SHAPES:
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {type(value).__name__}, wanted a text")
    return value


def _said_in_response(body: dict[str, Any]) -> tuple[str, str | None]:
    """Return text and refusal of the Responses API."""
    parts = [
        part for item in body.get("output") or [] if item.get("type") == "message" for part in item.get("content") or []
    ]
    text = "".join(part.get("text") or "" for part in parts if part.get("type") == "output_text")
    refused = [_text(part.get("refusal") or "refused") for part in parts if part.get("type") == "refusal"]
    if (body.get("incomplete_details") or {}).get("reason") == "content_filter":
        refused.append("content filter")
    return text, one_line(refused[0]) if refused else None


def _said_in_chat(body: dict[str, Any]) -> tuple[str, str | None]:
    """Return text and refusal of a chat completion."""
    choice = body["choices"][0]
    message = choice.get("message") or {}
    filtered = "content filter" if choice.get("finish_reason") == "content_filter" else None
    refusal = message.get("refusal") or filtered
    return _text(message.get("content") or ""), one_line(_text(refusal)) if refusal else None


def _is_cut(body: dict[str, Any]) -> bool:
    if "choices" in body:
        return bool(body["choices"][0]["finish_reason"] == "length")
    return bool(body["incomplete_details"]["reason"] == "max_output_tokens")


def _usage(usage: dict[str, Any]) -> Usage:
    """Return the counts of either interface, which have other names for the same.

    Counts of cached tokens that cannot be are left out: then all input counts at its full price, or at that of writing
    it into the cache where this is dearer.
    """
    counted = _tokens(usage.get("input_tokens", usage.get("prompt_tokens")))
    output = _tokens(usage.get("output_tokens", usage.get("completion_tokens")))
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    try:
        cached, written = (_tokens(details.get(name) or 0) for name in ("cached_tokens", "cache_write_tokens"))
        if cached + written > counted:
            raise ValueError("more cached tokens than tokens")
    except SHAPES:
        cached, written = 0, counted
    return Usage(input=counted, cached_input=cached, cache_write=written, output=output)


def _tokens(value: Any) -> int:
    count = int(value)
    if not 0 <= count <= MOST_TOKENS or count != float(value):
        raise ValueError(f"got {value}, wanted a number of tokens")
    return count
