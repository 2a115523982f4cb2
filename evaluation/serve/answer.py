"""Answers to requests, and replies in the form of OpenAI's API.

While an answer is being generated, its parts are passed on one by one. A reply is either a body with the complete
answers or a stream of chunks.
"""

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

ANSWER_SECONDS = 300.0  # time limit of an answer, including the time in the queue
JSON = dict[str, Any]


class Score(NamedTuple):
    """The log-probabilities of a token and of the likeliest tokens at its position.

    The probabilities are the model's own, before temperature and top-p are applied.
    """

    log_probability: float  # nats
    alternatives: list[tuple[int, float]]  # pairs of a token and its log-probability in nats, the likeliest first


class ScoredToken(NamedTuple):
    """A token of an answer, with its score."""

    token: int
    offset: int  # index, in the text, of the character that contains the token's first byte
    score: Score | None  # None for the first token of a prompt, which is not predicted


class AnswerPart(NamedTuple):
    """A part of an answer."""

    text: str
    tokens: list[ScoredToken]  # [] if the request does not ask for probabilities
    finish: str | None  # "stop" or "length" in the last part


class ServedAnswer:
    """An answer that the engine's thread generates and passes to `post` in parts. An exception ends the answer."""

    def __init__(self, request: AnswerRequest, served: ServedModel, post: Callable[[AnswerPart | Exception], None]):
        self.request, self.post = request, post
        self.deadline = time.monotonic() + ANSWER_SECONDS
        self.closed = False  # True: the client has received the complete answer or has disconnected
        self.drawing: Drawing | None = None  # set when the answer gets a slot
        self.cached = 0  # number of tokens of the prompt that were in the cache
        self.count = 0  # number of tokens in the answer so far
        self.has_begun = False  # True: the prompt has been computed
        self._trained = served.trained
        self._decoder = TextDecoder(served.trained.spell)
        self._posted, self._unposted = 0, ""  # number of posted characters; text that has not been posted yet
        self._tokens: list[ScoredToken] = []  # tokens that have not been posted yet
        self._prompt_scores: list[Score | None] = [None]  # scores computed so far, one for each prompt token

    @property
    def scores_prompt(self) -> bool:
        """True if the request asks for the probabilities of the prompt's tokens and they are not all computed yet."""
        return self.request.scores_prompt and not self.has_begun

    def begin(self, prefix: Prefix) -> None:
        """Begin to generate the answer in a slot. The cache of `prefix` may contain the beginning of the prompt."""
        if self.request.repeatable or self.scores_prompt:
            prefix.cache.length = 0
        request, ends = self.request, self._trained.stop_ids
        self.drawing = Drawing(prefix, request.prompt, request.count, request.sampling, ends)
        self.cached = prefix.cache.length

    def score_prompt(self, logits: Tensor) -> None:
        """Store the scores of the prompt's next tokens.

        `logits` (T, V): the predictions after T tokens of the prompt.
        """
        check_finite(logits, LOGITS)
        first = len(self._prompt_scores)
        following = self.request.prompt[first : first + len(logits)]
        self._prompt_scores += scores_of(following, logits[: len(following)], self.request.alternatives or 0)

    def parts_after(self, logits: Tensor) -> Iterator[AnswerPart]:
        """Choose the next token from `logits` (1, V), and yield the part of the answer that this token completes.

        If the request asks for an echo, the first call yields the prompt before that part.
        """
        if self.request.echo is not None and not self.has_begun:
            yield self._echo_part(self.request.echo)
        self.has_begun = True
        if self.request.count:
            assert self.drawing is not None
            yield self.take(self.drawing.take(logits))

    def take(self, choice: DrawnToken) -> AnswerPart:
        """Return the part of the answer that a new token completes. The text of the part may be empty."""
        alternatives = self.request.alternatives
        score = None if alternatives is None else scores_of([choice.token], choice.logits[None], alternatives)[0]
        if choice.finish == "stop":
            self._unposted += self._decoder.end()
            # lm-evaluation-harness scores a prompt by asking for a single token after it. It expects an entry for this
            # token, even if the token ends the text.
            if score is not None and self.request.echo is not None:
                self._tokens.append(ScoredToken(choice.token, self._decoder.characters, score))
            return self._part(None, "stop")
        self.count += 1
        text, offset = self._decoder.add(choice.token)
        self._unposted += text
        if score is not None:
            self._tokens.append(ScoredToken(choice.token, offset, score))
        positions = [position for stop in self.request.stop if (position := self._unposted.find(stop)) >= 0]
        if positions:
            return self._part(min(positions), "stop")
        if choice.finish == "length":
            return self._part(None, "length")
        # The end of the text is not posted yet if it may be the beginning of a stop string.
        lengths = [n for stop in self.request.stop for n in range(1, len(stop)) if self._unposted.endswith(stop[:n])]
        return self._part(len(self._unposted) - max(lengths, default=0), None)

    def _echo_part(self, prompt: list[int]) -> AnswerPart:
        """Return the prompt as the first part of the answer, or as the only part if no new tokens are requested.

        Stop strings are not searched for in the prompt.
        """
        pieces = [self._decoder.add(token) for token in prompt]
        self._unposted += "".join(piece.text for piece in pieces)
        if self.request.alternatives is not None:
            self._tokens += map(ScoredToken, prompt, (piece.offset for piece in pieces), self._prompt_scores)
        return self._part(len(self._unposted), None) if self.request.count else self._part(None, "length")

    def _part(self, end: int | None, finish: str | None) -> AnswerPart:
        """Return a part with the unposted text up to `end`, and with the tokens of this text.

        If `end` is None, the part has all of the text, including an incomplete last character.
        """
        if end is None:
            self._unposted += self._decoder.end()
        text, self._unposted = self._unposted[:end], self._unposted[len(self._unposted) if end is None else end :]
        self._posted += len(text)
        limit = self._posted + (end is None)  # the answer may end with a token without text
        tokens = [token for token in self._tokens if token.offset < limit]
        self._tokens = [token for token in self._tokens if token.offset >= limit]
        return AnswerPart(text, tokens, finish)


def scores_of(tokens: list[int], logits: Tensor, alternatives: int) -> list[Score]:
    """Return the scores of tokens (T,) from the logits that predict them (T, V).

    `alternatives`: the number of likeliest tokens in each score.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    token_scores = scores.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=scores.device)[:, None])[:, 0]
    likeliest = scores.topk(min(alternatives, scores.shape[-1]), dim=-1)
    ids, values = likeliest.indices.tolist(), likeliest.values.tolist()
    pairs = [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    return list(map(Score, token_scores.tolist(), pairs))


@attrs.frozen
class ApiReply:
    """The reply to a request in the form of OpenAI's API. It has one or several answers."""

    answers: list[ServedAnswer]  # in the order of their indices
    served: ServedModel
    created: int = attrs.field(factory=lambda: int(time.time()))
    number: str = attrs.field(factory=lambda: secrets.token_hex(12))

    @property
    def request(self) -> AnswerRequest:
        """The request for the first answer. The fields that determine the reply are the same in all requests."""
        return self.answers[0].request

    def body(self, parts: list[tuple[int, AnswerPart]]) -> JSON:
        """Return the complete reply. `parts`: the parts of all answers, each with the index of its answer."""
        choices = []
        for index in range(len(self.answers)):
            answer_parts = [part for part_index, part in parts if part_index == index]
            text = "".join(part.text for part in answer_parts)
            tokens = [token for part in answer_parts for token in part.tokens]
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(self._choice(index, AnswerPart(text, tokens, answer_parts[-1].finish), message))
        return {**self._head(""), "choices": choices, "usage": self.usage(), **self._left_out()}

    def chunk(self, index: int, part: AnswerPart, *, first: bool = False) -> JSON:
        """Return a chunk of a stream, with a part of the answer `index`. `first`: whether it is the first chunk."""
        delta = {"delta": {**({"role": "assistant"} if first else {}), "content": part.text}}
        unused = {"usage": None} if self.request.include_usage else {}
        left_out = self._left_out() if first else {}
        return {**self._head(".chunk"), "choices": [self._choice(index, part, delta)], **unused, **left_out}

    def usage_chunk(self) -> JSON:
        """Return the last chunk of a stream, which has the token counts."""
        return {**self._head(".chunk"), "choices": [], "usage": self.usage()}

    def usage(self) -> JSON:
        """Return the token counts. A prompt with several answers is counted once."""
        first = [answer for answer in self.answers if answer.request.is_first]
        prompt = sum(len(answer.request.prompt) for answer in first)
        count = sum(answer.count for answer in self.answers)
        tokens = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        return {**tokens, "prompt_tokens_details": {"cached_tokens": sum(answer.cached for answer in first)}}

    def _left_out(self) -> JSON:
        """Return a field with the number of oldest turns that were left out, or {} if truncation is disabled.

        This field is not part of OpenAI's API.
        """
        if self.request.left_out is None:
            return {}
        return {"left_out": max(answer.request.left_out or 0 for answer in self.answers)}

    def _head(self, suffix: str) -> JSON:
        kind, prefix = "text_completion", "cmpl"
        if self.request.is_chat:
            kind, prefix = f"chat.completion{suffix}", "chatcmpl"
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.served.name}

    def _choice(self, index: int, part: AnswerPart, chat: JSON) -> JSON:
        """Return the entry of an answer in the response's list of choices.

        `chat`: for a chat, the field of the entry that contains the answer. For a text completion, it is ignored.
        """
        is_chat, scores = self.request.is_chat, None
        if self.request.alternatives is not None:
            scores = self._chat_scores(part.tokens) if is_chat else self._scores(part.tokens)
        content = chat if is_chat else {"text": part.text}
        return {"index": index, **content, "logprobs": scores, "finish_reason": part.finish}

    def _chat_scores(self, tokens: list[ScoredToken]) -> JSON:
        """Return the field "logprobs" in the form of chat completions."""

        def entry(token: int, log_probability: float) -> JSON:
            spelled = self._bytes(token)
            return {"token": spelled.decode(errors="replace"), "logprob": log_probability, "bytes": [*spelled]}

        content = []
        for token in tokens:
            assert token.score is not None  # a token without a score occurs only in an echo, and chats have no echo
            likeliest = [entry(*pair) for pair in token.score.alternatives]
            content.append(entry(token.token, token.score.log_probability) | {"top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _scores(self, tokens: list[ScoredToken]) -> JSON:
        """Return the field "logprobs" in the form of text completions."""

        def name(token: int) -> str:
            return self._bytes(token).decode(errors="backslashreplace")

        def top_logprobs(token: ScoredToken, score: Score) -> dict[str, float]:
            """Return the likeliest tokens and, as OpenAI's API does, the chosen token if it is not one of them."""
            pairs = [*score.alternatives, (token.token, score.log_probability)]
            # The order is reversed so that, if several tokens have the same name, the likeliest one wins.
            return {name(token_id): log_probability for token_id, log_probability in reversed(pairs)}

        return {
            "tokens": [name(token.token) for token in tokens],
            "token_logprobs": [token.score and token.score.log_probability for token in tokens],
            "top_logprobs": [token.score and top_logprobs(token, token.score) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _bytes(self, token: int) -> bytes:
        return self.served.trained.spell(token)


def as_event(value: JSON) -> bytes:
    """Return a value as a server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
