"""Replies of any shape are read, and impossible token counts are not believed."""

from typing import Any

import pytest

from evaluation.judging.replies import read_reply
from evaluation.judging.store import Asked, Usage

ASKED = Asked(id="i", key="k", judge="j", answers=1, sent_bytes=1, limit=1, most=Usage(input=1, output=1))
NOT_CACHED = Usage(input=9, cache_write=9, output=5)  # the dearest that it can have been


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        None,
        {"output": [3]},
        {"output": [{"type": "message", "content": None}]},
        {"choices": []},
        {"choices": [{"message": None}], "usage": {}},
        {"choices": 7},
        {"choices": {"0": {}}},
        {"choices": [[]]},
        {"choices": [{"message": {"content": {"text": 1}}}]},
        {"output": {"type": "message"}},
        {"id": [1], "model": {}, "usage": [1], "error": []},
    ],
)
def test_any_shape_of_reply_is_read_as_a_wrong_verdict(body: Any) -> None:
    reply = read_reply(ASKED, body)
    assert (reply.text, reply.refusal, reply.usage) == ("", None, None)


def test_an_error_in_place_of_an_answer_keeps_the_servers_message() -> None:
    reply = read_reply(ASKED, {"error": {"message": "overloaded \x1b[2J, try later"}})
    assert reply.problem(3) == "the server says: overloaded \\x1b[2J, try later"
    assert read_reply(ASKED, {"error": "no credit"}).problem(3) == "the server says: no credit"


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ({"input_tokens": 9, "output_tokens": 5}, Usage(input=9, output=5)),
        ({"prompt_tokens": 9, "completion_tokens": 5.0}, Usage(input=9, output=5)),
        ({"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 90}}, NOT_CACHED),
        ({"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": -90}}, NOT_CACHED),
        ({"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1e99}}, NOT_CACHED),
        ({"input_tokens": -9, "output_tokens": 5}, None),
        ({"input_tokens": 9, "output_tokens": 10**30}, None),
        ({"input_tokens": 0, "output_tokens": 0}, None),
        ({"input_tokens": True}, None),
        ([1, 2], None),
        ("many", None),
    ],
)
def test_counts_of_tokens_that_cannot_be_are_no_counts(said: Any, counted: Usage | None) -> None:
    body = {"choices": [{"message": {"content": "text"}}], "usage": said}
    assert read_reply(ASKED, body).usage == counted
