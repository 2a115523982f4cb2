"""Answer to a request: parts of text as tokens are drawn, up to a stop string, an end token or the wanted length."""

import codecs
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from evaluation.serve.api_request import AnswerRequest, ServedModel
from model.generate import Drawing, Drawn, Prefix

ANSWER_SECONDS = 300.0  # most, waiting included


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
    """One answer: drawn by the engine's thread, `post`ed in parts; an exception ends it early."""

    def __init__(self, request: AnswerRequest, served: ServedModel, post: Callable[[AnswerPart | Exception], None]):
        self.request, self.post = request, post
        self.deadline = time.monotonic() + ANSWER_SECONDS
        self.closed = False  # its reader has all of it, or has left
        self.drawing: Drawing | None = None  # once it has a slot
        self.cached, self.count = 0, 0  # tokens of the prompt that were not computed again; of the answer
        self._spelled, self._end_ids = served.trained.tokenizer.spelled, served.trained.stop_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._tokens = "", list[tuple[int, ScoredToken]]()  # not posted yet; tokens with their places in it

    @property
    def computes_prompt(self) -> bool:
        return self.drawing is not None and len(self.drawing.new) > 1

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


def _scored(drawn: Drawn, alternatives: int) -> ScoredToken:
    scores = torch.log_softmax(drawn.logits, dim=-1)
    likeliest = scores.topk(min(alternatives, len(scores)))
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return ScoredToken(drawn.token, float(scores[drawn.token]), list(pairs))
