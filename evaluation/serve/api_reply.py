"""Replies of OpenAI's API: bodies and chunks of chat completions and of completions."""

import json
import secrets
import time
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import attrs

from evaluation.serve.answer import AnswerPart, DrawnAnswer, ScoredToken
from evaluation.serve.api_request import ServedModel

JSON = dict[str, Any]


@attrs.frozen
class ApiReply:
    """Form of the reply to one request."""

    answer: DrawnAnswer
    served: ServedModel
    created: int = attrs.field(factory=lambda: int(time.time()))
    number: str = attrs.field(factory=lambda: secrets.token_hex(12))

    def body(self, parts: list[AnswerPart]) -> JSON:
        """Return the reply of all parts."""
        text, tokens = "".join(part.text for part in parts), [token for part in parts for token in part.tokens]
        whole = AnswerPart(text, tokens, parts[-1].finish)
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.answer.request.is_chat
            else {"text": text}
        )
        return {**self._head(""), "choices": [self._choice(whole, content, 0)], "usage": self.usage()}

    def chunk(self, part: AnswerPart, offset: int | None) -> JSON:
        """Return a part of a stream, after `offset` characters; None: the first one."""
        role = {"role": "assistant"} if offset is None else {}
        content = {"delta": {**role, "content": part.text}} if self.answer.request.is_chat else {"text": part.text}
        unused = {"usage": None} if self.answer.request.include_usage else {}
        return {**self._head(".chunk"), "choices": [self._choice(part, content, offset or 0)], **unused}

    def usage_chunk(self) -> JSON:
        """Return the last chunk of a stream that asks for its usage."""
        return {**self._head(".chunk"), "choices": [], "usage": self.usage()}

    def usage(self) -> JSON:
        prompt, count = len(self.answer.request.prompt), self.answer.count
        cached = {"cached_tokens": self.answer.cached}
        tokens = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        return {**tokens, "prompt_tokens_details": cached}

    def _head(self, suffix: str) -> JSON:
        kind, prefix = (
            (f"chat.completion{suffix}", "chatcmpl") if self.answer.request.is_chat else ("text_completion", "cmpl")
        )
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.served.name}

    def _choice(self, part: AnswerPart, content: JSON, offset: int) -> JSON:
        scores = None
        if self.answer.request.alternatives is not None:
            scores = (
                self._chat_scores(part.tokens) if self.answer.request.is_chat else self._scores(part.tokens, offset)
            )
        return {"index": 0, **content, "logprobs": scores, "finish_reason": part.finish}

    def _chat_scores(self, tokens: Iterable[ScoredToken]) -> JSON:
        def scored(token: int, log_probability: float) -> JSON:
            spelled = self._bytes(token)
            return {"token": spelled.decode(errors="replace"), "logprob": log_probability, "bytes": [*spelled]}

        content = [
            {
                **scored(one.token, one.log_probability),
                "top_logprobs": [scored(token, value) for token, value in one.alternatives],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _scores(self, tokens: list[ScoredToken], offset: int) -> JSON:
        lengths = [len(self._bytes(one.token).decode(errors="ignore")) for one in tokens]
        return {
            "tokens": [self._name(one.token) for one in tokens],
            "token_logprobs": [one.log_probability for one in tokens],
            "top_logprobs": [{self._name(token): value for token, value in one.alternatives} for one in tokens],
            "text_offset": [*accumulate(lengths, initial=offset)][:-1],
        }

    def _bytes(self, token: int) -> bytes:
        return self.served.trained.tokenizer.spelled.get(token, b"")

    def _name(self, token: int) -> str:
        return self._bytes(token).decode(errors="backslashreplace")


def as_event(value: JSON) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
