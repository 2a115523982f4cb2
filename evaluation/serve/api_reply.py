"""Replies of OpenAI's API: bodies and chunks of chat completions and of completions."""

import json
import secrets
import time
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
        text, tokens = "".join(part.text for part in parts), [token for part in parts for token in part.tokens]
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = self._choice(AnswerPart(text, tokens, parts[-1].finish), message)
        return {**self._head(""), "choices": [choice], "usage": self.usage()}

    def chunk(self, part: AnswerPart, *, first: bool = False) -> JSON:
        delta = {"delta": {**({"role": "assistant"} if first else {}), "content": part.text}}
        unused = {"usage": None} if self.answer.request.include_usage else {}
        return {**self._head(".chunk"), "choices": [self._choice(part, delta)], **unused}

    def usage_chunk(self) -> JSON:
        return {**self._head(".chunk"), "choices": [], "usage": self.usage()}

    def usage(self) -> JSON:
        prompt, count = len(self.answer.request.prompt), self.answer.count
        tokens = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        return {**tokens, "prompt_tokens_details": {"cached_tokens": self.answer.cached}}

    def _head(self, suffix: str) -> JSON:
        kind, prefix = "text_completion", "cmpl"
        if self.answer.request.is_chat:
            kind, prefix = f"chat.completion{suffix}", "chatcmpl"
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.served.name}

    def _choice(self, part: AnswerPart, chat: JSON) -> JSON:
        """Return a choice; `chat`: its content in a chat completion."""
        is_chat, scores = self.answer.request.is_chat, None
        if self.answer.request.alternatives is not None:
            scores = self._chat_scores(part.tokens) if is_chat else self._scores(part.tokens)
        content = chat if is_chat else {"text": part.text}
        return {"index": 0, **content, "logprobs": scores, "finish_reason": part.finish}

    def _chat_scores(self, tokens: list[ScoredToken]) -> JSON:
        def scored(token: int, log_probability: float) -> JSON:
            spelled = self._bytes(token)
            return {"token": spelled.decode(errors="replace"), "logprob": log_probability, "bytes": [*spelled]}

        rows = [[scored(*each) for each in [(one.token, one.log_probability), *one.alternatives]] for one in tokens]
        content = [token | {"top_logprobs": likeliest} for token, *likeliest in rows]
        return {"content": content, "refusal": None}

    def _scores(self, tokens: list[ScoredToken]) -> JSON:
        def name(token: int) -> str:
            return self._bytes(token).decode(errors="backslashreplace")

        return {
            "tokens": [name(one.token) for one in tokens],
            "token_logprobs": [one.log_probability for one in tokens],
            "top_logprobs": [{name(token): value for token, value in one.alternatives} for one in tokens],
        }

    def _bytes(self, token: int) -> bytes:
        return self.served.trained.tokenizer.spelled.get(token, b"")


def as_event(value: JSON) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
