"""Answer to a request: parts of text as tokens are drawn, and bodies and chunks of OpenAI's API made of them."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from evaluation.generation.generated_text import TextDecoder
from evaluation.serve.api_request import AnswerRequest, ServedModel
from model.generate import LOGITS, Drawing, DrawnToken, Prefix
from model.loss import check_finite

ANSWER_SECONDS = 300.0  # most, waiting included
JSON = dict[str, Any]


class Score(NamedTuple):
    """A token's log-probability before temperature and top-p, and those of the likeliest tokens in its place."""

    log_probability: float  # nats
    alternatives: list[tuple[int, float]]  # token and nats, the likeliest first


class ScoredToken(NamedTuple):
    token: int
    offset: int  # in characters: where the character that holds the token's first byte stands in the text
    score: Score | None  # None: the first token of a prompt, which follows nothing


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
        self.has_begun = False  # the prompt is computed
        self._trained = served.trained
        self._decoder = TextDecoder(served.trained.spell)
        self._posted, self._held = 0, ""  # characters that are posted, and text that is not yet
        self._tokens: list[ScoredToken] = []  # not posted yet
        self._prompt_scores: list[Score | None] = [None]  # of as much of the prompt as is computed

    @property
    def scores_prompt(self) -> bool:
        """True while the prompt is computed, if the request asks for its probabilities."""
        return self.request.scores_prompt and not self.has_begun

    def begin(self, prefix: Prefix) -> None:
        """Take a slot, whose prefix may hold the beginning of the prompt."""
        if self.request.repeatable or self.scores_prompt:
            prefix.cache.length = 0
        request, ends = self.request, self._trained.stop_ids
        self.drawing = Drawing(prefix, request.prompt, request.count, request.sampling, ends)
        self.cached = prefix.cache.length

    def score_prompt(self, logits: Tensor) -> None:
        """Keep the probabilities of the next tokens of the prompt. `logits`: (T, V), after T of its tokens."""
        check_finite(logits, LOGITS)
        first = len(self._prompt_scores)
        following = self.request.prompt[first : first + len(logits)]
        self._prompt_scores += scores_of(following, logits[: len(following)], self.request.alternatives or 0)

    def parts_after(self, logits: Tensor) -> Iterator[AnswerPart]:
        """Yield the echo of the prompt, the first time, and the part that a new token completes. `logits`: (1, V)."""
        if self.request.echo is not None and not self.has_begun:
            yield self._echo_part(self.request.echo)
        self.has_begun = True
        if self.request.count:
            assert self.drawing is not None
            yield self.take(self.drawing.take(logits))

    def take(self, drawn: DrawnToken) -> AnswerPart:
        """Return the part that a new token completes; its text may be empty."""
        alternatives = self.request.alternatives
        score = None if alternatives is None else scores_of([drawn.token], drawn.logits[None], alternatives)[0]
        if drawn.finish == "stop":
            self._held += self._decoder.end()
            # lm-evaluation-harness asks for one token after the prompt that it scores, and counts on an entry for it.
            if score is not None and self.request.echo is not None:
                self._tokens.append(ScoredToken(drawn.token, self._decoder.characters, score))
            return self._part(None, "stop")
        self.count += 1
        text, offset = self._decoder.add(drawn.token)
        self._held += text
        if score is not None:
            self._tokens.append(ScoredToken(drawn.token, offset, score))
        found = [place for stop in self.request.stop if (place := self._held.find(stop)) >= 0]
        if found:
            return self._part(min(found), "stop")
        if drawn.finish == "length":
            return self._part(None, "length")
        begun = [n for stop in self.request.stop for n in range(1, len(stop)) if self._held.endswith(stop[:n])]
        return self._part(len(self._held) - max(begun, default=0), None)  # the rest may begin a stop string

    def _echo_part(self, prompt: list[int]) -> AnswerPart:
        """Return the prompt as the first part, in which no stop string is searched for; as the last, too, if it is."""
        pieces = [self._decoder.add(token) for token in prompt]
        self._held += "".join(piece.text for piece in pieces)
        if self.request.alternatives is not None:
            self._tokens += map(ScoredToken, prompt, (piece.offset for piece in pieces), self._prompt_scores)
        return self._part(len(self._held), None) if self.request.count else self._part(None, "length")

    def _part(self, end: int | None, finish: str | None) -> AnswerPart:
        """Release held text up to `end`, and its tokens; None: all of it, the rest of a broken character too."""
        if end is None:
            self._held += self._decoder.end()
        text, self._held = self._held[:end], self._held[len(self._held) if end is None else end :]
        self._posted += len(text)
        limit = self._posted + (end is None)  # a last token without text is released, too
        released = [one for one in self._tokens if one.offset < limit]
        self._tokens = [one for one in self._tokens if one.offset >= limit]
        return AnswerPart(text, released, finish)


def scores_of(tokens: list[int], logits: Tensor, alternatives: int) -> list[Score]:
    """Return the scores of tokens (T,), each by its row of logits (T, V), with the likeliest `alternatives`."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    given = scores.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=scores.device)[:, None])[:, 0]
    likeliest = scores.topk(min(alternatives, scores.shape[-1]), dim=-1)
    ids, values = likeliest.indices.tolist(), likeliest.values.tolist()
    pairs = [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    return list(map(Score, given.tolist(), pairs))


@attrs.frozen
class ApiReply:
    """Form of the reply to one request, which has one answer or several."""

    answers: list[DrawnAnswer]  # in the order of their indices
    served: ServedModel
    created: int = attrs.field(factory=lambda: int(time.time()))
    number: str = attrs.field(factory=lambda: secrets.token_hex(12))

    @property
    def request(self) -> AnswerRequest:
        """The first answer's request; the fields that the reply depends on are those of all."""
        return self.answers[0].request

    def body(self, parts: list[tuple[int, AnswerPart]]) -> JSON:
        """Return the whole reply. `parts`: of all answers, each with the index of its answer."""
        choices = []
        for index in range(len(self.answers)):
            own = [part for place, part in parts if place == index]
            text, tokens = "".join(part.text for part in own), [token for part in own for token in part.tokens]
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(self._choice(index, AnswerPart(text, tokens, own[-1].finish), message))
        return {**self._head(""), "choices": choices, "usage": self.usage(), **self._left_out()}

    def chunk(self, index: int, part: AnswerPart, *, first: bool = False) -> JSON:
        delta = {"delta": {**({"role": "assistant"} if first else {}), "content": part.text}}
        unused = {"usage": None} if self.request.include_usage else {}
        left_out = self._left_out() if first else {}
        return {**self._head(".chunk"), "choices": [self._choice(index, part, delta)], **unused, **left_out}

    def usage_chunk(self) -> JSON:
        return {**self._head(".chunk"), "choices": [], "usage": self.usage()}

    def usage(self) -> JSON:
        """Return counts of tokens: of each prompt once, however many answers it has, and of all answers."""
        first = [answer for answer in self.answers if answer.request.is_first]
        prompt, count = sum(len(one.request.prompt) for one in first), sum(one.count for one in self.answers)
        tokens = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        return {**tokens, "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in first)}}

    def _left_out(self) -> JSON:
        """Return how many of the oldest turns are left out, if the request asks for truncation; not in OpenAI's API."""
        if self.request.left_out is None:
            return {}
        return {"left_out": max(answer.request.left_out or 0 for answer in self.answers)}

    def _head(self, suffix: str) -> JSON:
        kind, prefix = "text_completion", "cmpl"
        if self.request.is_chat:
            kind, prefix = f"chat.completion{suffix}", "chatcmpl"
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.served.name}

    def _choice(self, index: int, part: AnswerPart, chat: JSON) -> JSON:
        """Return a choice; `chat`: its content in a chat completion."""
        is_chat, scores = self.request.is_chat, None
        if self.request.alternatives is not None:
            scores = self._chat_scores(part.tokens) if is_chat else self._scores(part.tokens)
        content = chat if is_chat else {"text": part.text}
        return {"index": index, **content, "logprobs": scores, "finish_reason": part.finish}

    def _chat_scores(self, tokens: list[ScoredToken]) -> JSON:
        def scored(token: int, log_probability: float) -> JSON:
            spelled = self._bytes(token)
            return {"token": spelled.decode(errors="replace"), "logprob": log_probability, "bytes": [*spelled]}

        content = []
        for one in tokens:
            assert one.score is not None  # a chat has no echo
            likeliest = [scored(*pair) for pair in one.score.alternatives]
            content.append(scored(one.token, one.score.log_probability) | {"top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _scores(self, tokens: list[ScoredToken]) -> JSON:
        def name(token: int) -> str:
            return self._bytes(token).decode(errors="backslashreplace")

        def named(one: ScoredToken, score: Score) -> dict[str, float]:
            """Return the likeliest tokens, and the given one if it is none of them, as OpenAI's API does."""
            pairs = [*score.alternatives, (one.token, score.log_probability)]
            return {name(token): value for token, value in reversed(pairs)}  # of two with one name, the likelier

        return {
            "tokens": [name(one.token) for one in tokens],
            "token_logprobs": [one.score and one.score.log_probability for one in tokens],
            "top_logprobs": [one.score and named(one, one.score) for one in tokens],
            "text_offset": [one.offset for one in tokens],
        }

    def _bytes(self, token: int) -> bytes:
        return self.served.trained.spell(token)


def as_event(value: JSON) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
