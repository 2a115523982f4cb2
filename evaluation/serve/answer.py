"""Answer to a request: parts of text as tokens are drawn, and bodies and chunks of OpenAI's API made of them."""

import codecs
import json
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch

from evaluation.serve.api_request import AnswerRequest, ServedModel
from model.generate import Drawing, Drawn, Prefix

ANSWER_SECONDS = 300.0  # most, waiting included
JSON = dict[str, Any]


class ScoredToken(NamedTuple):
    """A token, its log-probability before temperature and top-p, and those of the likeliest tokens in its place."""

    token: int
    log_probability: float  # nats
    alternatives: list[tuple[int, float]]


class AnswerPart(NamedTuple):
    text: str
    tokens: list[ScoredToken]  # where the request asks for them
    finish: str | None  # "stop" or "length", of the last part


class DrawnAnswer:
    """One answer, drawn by the engine's thread and `post`ed in parts; an exception ends it early."""

    def __init__(self, request: AnswerRequest, served: ServedModel, post: Callable[[AnswerPart | Exception], None]):
        self.request, self.post = request, post
        self.deadline = time.monotonic() + ANSWER_SECONDS
        self.closed = False  # its reader has all of it, or has left
        self.drawing: Drawing | None = None  # once it has a slot
        self.cached, self.count = 0, 0  # tokens of the prompt that were not computed again; of the answer
        self._spelled, self._end_ids = served.trained.tokenizer.spelled, served.trained.stop_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._tokens = "", list[tuple[int, ScoredToken]]()  # not posted yet; tokens with their places in it

    def begin(self, prefix: Prefix) -> None:
        """Take a slot, whose prefix may hold the beginning of the prompt."""
        if self.request.repeatable:
            prefix.cache.length = 0
        self.drawing = Drawing(prefix, self.request.prompt, self.request.sampling)
        self.cached = prefix.cache.length

    def take(self, drawn: Drawn) -> AnswerPart:
        """Return the part that a new token completes; its text may be empty."""
        if drawn.token in self._end_ids:
            return self._part(None, "stop")
        self.count += 1
        if self.request.alternatives is not None:
            self._tokens.append((len(self._held), _scored(drawn, self.request.alternatives)))
        self._held += self._decoder.decode(self._spelled.get(drawn.token, b""))
        found = [place for stop in self.request.stop if (place := self._held.find(stop)) >= 0]
        if found:
            return self._part(min(found), "stop")
        if self.count == self.request.count:
            return self._part(None, "length")
        begun = [n for stop in self.request.stop for n in range(1, len(stop)) if self._held.endswith(stop[:n])]
        return self._part(len(self._held) - max(begun, default=0), None)  # the rest may begin a stop string

    def _part(self, end: int | None, finish: str | None) -> AnswerPart:
        """Release held text up to `end`, and its tokens; None: all of it, the rest of a broken character too."""
        if end is None:
            self._held += self._decoder.decode(b"", final=True)
        text = self._held[:end]
        cut = len(text) + (end is None)
        released = [token for place, token in self._tokens if place < cut]
        self._tokens = [(place - cut, token) for place, token in self._tokens if place >= cut]
        self._held = self._held[len(text) :]
        return AnswerPart(text, released, finish)


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


def _scored(drawn: Drawn, alternatives: int) -> ScoredToken:
    scores = torch.log_softmax(drawn.logits, dim=-1)
    likeliest = scores.topk(min(alternatives, len(scores)))
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return ScoredToken(drawn.token, float(scores[drawn.token]), list(pairs))
