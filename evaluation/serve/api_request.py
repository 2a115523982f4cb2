"""Read requests in the form of OpenAI's API: check the JSON body, and return each answer's options and prompt ids."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import attrs

from common.checks import ValueCheck, boolean, checked, integer, is_absent, number, one_of, optional, text
from common.errors import BadInput, InvalidValue, Problem
from common.json_files import check_text, is_number, parse_json
from common.text import LARGEST_INTEGER, quoted
from evaluation.command_line import LEAST_TEMPERATURE
from evaluation.generation.prompts import TooLong, latest_turns
from evaluation.shared.load import Trained
from model.generate import Sampling
from tokens.documents.messages import read_message
from tokens.tokenizer.template import ASSISTANT, SYSTEM, USER, Message

STOP_STRINGS, STOP_CHARACTERS = 4, 1000  # at most 4 stop strings, with at most 1,000 characters each
MOST_CHOICES = 128  # largest number of answers to a prompt, as in OpenAI's API
ANY_TEXT = ValueCheck(lambda value: isinstance(value, str), "a string")
ONE = ValueCheck(lambda value: type(value) is int and value == 1, "1")
# Parameters that have no effect on an answer of this server.
IGNORED = {
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), ANY_TEXT),
    **dict.fromkeys(("store", "parallel_tool_calls"), boolean()),
    "metadata": ValueCheck(lambda value: isinstance(value, dict), "an object"),
}
# Parameters whose effect on an answer is not implemented. Only the values that have no effect are accepted.
NEUTRAL = {
    "best_of": ONE,
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ValueCheck(lambda v: is_number(v) and v == 0, "0")),
    **dict.fromkeys(("tools", "functions", "logit_bias", "suffix"), ValueCheck(is_absent, "nothing")),
    **dict.fromkeys(("tool_choice", "function_call"), ValueCheck(lambda value: value == "none", '"none"')),
    "response_format": ValueCheck(lambda value: value == {"type": "text"}, '{"type": "text"}'),
}
NEUTRAL_OF_CHAT = {"n": ONE, "echo": ValueCheck(lambda value: value is False, "false")}


class ApiError(Exception):
    """The refusal or failure of a request, in the form of the API."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@attrs.frozen(kw_only=True)
class ServedModel:
    """The model that clients use, and its limits."""

    trained: Trained
    name: str
    longest_answer: int  # largest number of tokens in an answer
    most_answers: int  # largest number of answers to a request: the engine's slots plus the places in its queue

    @property
    def context(self) -> int:
        return self.trained.network.config.context_length


def _is_stop(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > STOP_STRINGS:
        return False
    return all(isinstance(string, str) and 0 < len(string) <= STOP_CHARACTERS for string in strings)


STOP = ValueCheck(_is_stop, f"at most {STOP_STRINGS} strings of at most {STOP_CHARACTERS:,} characters")
TEXTS = ValueCheck(
    lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value), "a list of strings"
)


def _is_stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or not {*value} <= {"include_usage", "include_obfuscation"}:
        return False
    usage, obfuscation = (value.get(name) for name in ("include_usage", "include_obfuscation"))
    return (usage is None or type(usage) is bool) and (obfuscation is None or obfuscation is False)


STREAM_OPTIONS = ValueCheck(_is_stream_options, '{"include_usage": true} or {"include_usage": false}')


@attrs.frozen(kw_only=True)
class AnswerOptions:
    """The parameters that text completions and chat completions have in common."""

    model: str = attrs.field(validator=text())
    max_tokens: int | None = attrs.field(default=None, validator=optional(integer(1)))
    temperature: float = attrs.field(default=1.0, validator=number(0, 2))
    top_p: float = attrs.field(default=1.0, validator=number(0, 1, above=True))
    seed: int | None = attrs.field(default=None, validator=optional(integer(-LARGEST_INTEGER)))
    stop: str | list[str] = attrs.field(factory=list, validator=STOP)
    stream: bool = attrs.field(default=False, validator=boolean())
    stream_options: dict[str, bool] = attrs.field(factory=dict, validator=STREAM_OPTIONS)
    # A parameter of OpenAI's Responses API. With "auto", if the context is too short, the oldest turns are left out and
    # their number is reported.
    truncation: str = attrs.field(default="disabled", validator=one_of("disabled", "auto"))


@attrs.frozen(kw_only=True)
class CompletionBody(AnswerOptions):
    """The body of a request to /v1/completions."""

    prompt: Any
    # Earlier prompts, each followed by its continuation. All of these texts are put before every prompt.
    earlier: list[str] = attrs.field(factory=list, validator=TEXTS)
    n: int = attrs.field(default=1, validator=integer(1, MOST_CHOICES))
    echo: bool = attrs.field(default=False, validator=boolean())
    max_tokens: int = attrs.field(default=16, validator=integer(0))  # OpenAI's default
    logprobs: int | None = attrs.field(default=None, validator=optional(integer(0, 20)))


@attrs.frozen(kw_only=True)
class ChatBody(AnswerOptions):
    """The body of a request to /v1/chat/completions."""

    messages: list[Any] = attrs.field(
        validator=ValueCheck(lambda value: isinstance(value, list) and value != [], "a list of messages")
    )
    max_completion_tokens: int | None = attrs.field(default=None, validator=optional(integer(1)))
    logprobs: bool = attrs.field(default=False, validator=boolean())
    top_logprobs: int = attrs.field(default=0, validator=integer(0, 20))


@attrs.frozen(kw_only=True)
class AnswerRequest:
    """The request for a single answer.

    A client's request with several prompts, or with n above 1, is divided into several such requests.
    """

    prompt: list[int]
    is_first: bool = True  # True for only one of the answers to a prompt, so that the prompt is counted once
    left_out: int | None = None  # number of oldest turns that were left out; None: truncation is disabled
    echo: list[int] | None = None  # the prompt's tokens, if the answer has to begin with them; [] for an empty prompt
    count: int  # largest number of new tokens; 0 only with echo
    sampling: Sampling
    stop: tuple[str, ...]
    alternatives: int | None  # number of likeliest tokens to report at each position; None: no probabilities
    stream: bool
    include_usage: bool
    is_chat: bool
    repeatable: bool  # True if there is a seed; then the answer shares no cache or batch that could change its bits

    @property
    def scores_prompt(self) -> bool:
        """True if the answer also reports the probabilities of the prompt's tokens."""
        return bool(self.echo) and self.alternatives is not None


def read_request(content: bytes, served: ServedModel, *, chat: bool) -> list[AnswerRequest]:
    """Return the answers that a client's request asks for, in the order of their indices. Raises ApiError."""
    try:
        body = {key: value for key, value in parse_json(content).items() if value is not None}
        neutral = NEUTRAL | (NEUTRAL_OF_CHAT if chat else {})
        for key, check in (IGNORED | neutral).items():
            if key in body and not check.holds(value := body.pop(key)):
                unsupported = "not supported by this server; " if key in neutral else ""
                problem = (
                    f"{key}: {unsupported}got {quoted(value)}, wanted {check.accepted_values}; you may leave it out"
                )
                raise ApiError(400, problem, param=key, code="unsupported_parameter" if key in neutral else None)
        parsed = checked(ChatBody, body) if chat else checked(CompletionBody, body)
        if parsed.model != served.name:
            problem = f"the model {quoted(parsed.model)} does not exist; this server has '{served.name}'"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return _chat_answers(parsed, served) if isinstance(parsed, ChatBody) else _text_answers(parsed, served)
    except (ValueError, BadInput) as error:
        param = error.problem.key if isinstance(error, InvalidValue) else ""
        raise ApiError(400, str(error), param=param or None) from error


@contextmanager
def _naming_parameter(param: str) -> Iterator[None]:
    """Add a parameter's name to errors about its content, unless they already name it."""
    try:
        yield
    except InvalidValue:
        raise
    except (ValueError, BadInput) as error:
        raise InvalidValue(Problem(key=param, text=str(error))) from error


def _chat_answers(body: ChatBody, served: ServedModel) -> list[AnswerRequest]:
    """Return the answer to a conversation."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidValue(Problem(key="top_logprobs", found="a number", expected="logprobs to be true as well"))
    left_out, prompt = _chat_prompt(body, served)
    return [attrs.evolve(_answer_request(body, served, prompt, None), left_out=left_out)]


def _text_answers(body: CompletionBody, served: ServedModel) -> list[AnswerRequest]:
    """Return the answers to all prompts, in the order of the prompts."""
    if not body.max_tokens and not body.echo:
        expected = "at least 1, or echo to be true"
        raise InvalidValue(Problem(key="max_tokens", found="0", expected=expected, cause="the answer would be empty"))
    prompts = _prompts_of(body)
    if (answers := len(prompts) * body.n) > served.most_answers:
        problem = f"prompt: {len(prompts):,} prompts with n = {body.n} are {answers:,} answers"
        limit = (
            f"this server allows at most {served.most_answers:,} answers per request, because of its options --slots "
            "and --queue"
        )
        raise InvalidValue(Problem(key="prompt", text=problem, advice=limit))
    requests: list[AnswerRequest] = []
    for where, content in prompts.items():
        if body.echo and body.logprobs is not None:
            _check_scored(where, content, served)
        left_out, prompt = _plain_prompt(where, content, body, served)
        first = attrs.evolve(_answer_request(body, served, prompt, where), left_out=left_out)
        if body.echo:
            first = attrs.evolve(first, echo=prompt if content or body.earlier else [])
        for index in range(body.n):
            sampling = attrs.evolve(first.sampling, seed=_seed(body, index))
            requests.append(attrs.evolve(first, is_first=index == 0, sampling=sampling))
    return requests


def _answer_request(
    body: ChatBody | CompletionBody, served: ServedModel, prompt: list[int], where: str | None
) -> AnswerRequest:
    """Return the request for the first answer to a prompt, without echo. Raises ApiError.

    `where`: the name of the prompt in error messages; None: the prompt is a conversation.
    """
    count = _longest_answer(body, served)
    if len(prompt) + min(count, 1) > served.context:
        subject = "the prompt has" if where in (None, "prompt") else f"{where}: the prompt has"
        limit = "prompt and answer together may have" if count else "the context has"
        problem = f"{subject} {len(prompt):,} tokens; {limit} at most {served.context:,} tokens"
        raise _too_long(problem, where and "prompt")
    if body.stream_options and not body.stream:
        found, expected = "this option without a stream", "stream to be true as well"
        raise InvalidValue(Problem(key="stream_options", found=found, expected=expected))
    alternatives = (body.top_logprobs if body.logprobs else None) if isinstance(body, ChatBody) else body.logprobs
    # Below LEAST_TEMPERATURE, logits would exceed the range of fp32. Greedy sampling, the limit at 0, is used instead.
    temperature = body.temperature if body.temperature >= LEAST_TEMPERATURE else 0.0
    return AnswerRequest(
        prompt=prompt,
        count=min(count, served.context - len(prompt)),
        sampling=Sampling(temperature=temperature, top_p=body.top_p, seed=_seed(body, 0)),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        alternatives=alternatives,
        stream=body.stream,
        include_usage=bool(body.stream_options.get("include_usage")),
        is_chat=isinstance(body, ChatBody),
        repeatable=body.seed is not None,
    )


def _longest_answer(body: ChatBody | CompletionBody, served: ServedModel) -> int:
    """Return the largest number of tokens that an answer may have if the context is long enough."""
    limit = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if limit not in (None, body.max_completion_tokens):
            found = f"{limit} and max_completion_tokens {body.max_completion_tokens}"
            raise InvalidValue(Problem(key="max_tokens", found=found, expected="only one of them"))
        limit = body.max_completion_tokens
    return served.longest_answer if limit is None else min(limit, served.longest_answer)


def _too_long(problem: str, param: str | None) -> ApiError:
    return ApiError(400, problem, param=param, code="context_length_exceeded")


def _seed(body: AnswerOptions, index: int) -> int:
    """Return the seed of an answer. `index`: its index among the answers to its prompt.

    The seed does not depend on the other prompts of the request.
    """
    return secrets.randbits(53) if body.seed is None else body.seed + index


def _prompts_of(body: CompletionBody) -> dict[str, Any]:
    """Return the prompts of a request. The keys are the prompts' names in error messages.

    The field `prompt` contains one prompt or a list of prompts. Each prompt is a string or a list of token ids.
    """
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not all(type(entry) is int for entry in prompt):
        return {f"prompt[{number}]": entry for number, entry in enumerate(prompt)}
    return {"prompt": prompt}


def _plain_prompt(where: str, content: Any, body: CompletionBody, served: ServedModel) -> tuple[int | None, list[int]]:
    """Return the number of earlier texts that were left out, and the ids of the prompt.

    The number is None if leaving out texts is not allowed. `content`: the prompt in the request, which is a string or a
    list of token ids.
    """
    if isinstance(content, str):
        texts = [*body.earlier, content]
        with _naming_parameter("prompt"):
            for text in texts:
                check_text(text, where)
        turns = [Message((USER, ASSISTANT)[number % 2], text) for number, text in enumerate(texts)]
        return _prompt_of(
            [], turns, lambda turns: served.trained.encode("".join(text for _, text in turns)), body, served
        )
    if body.earlier:
        raise InvalidValue(Problem(key="earlier", found="texts before token ids", expected=f"{where} to be a string"))
    ids = integer(0, served.trained.network.config.vocab_size - 1)
    if isinstance(content, list) and content and all(map(ids.holds, content)):
        return None, content
    problem = f"{where}: got {quoted(content)}, wanted a string, or a list of token ids, each {ids.accepted_values}"
    advice = "" if where != "prompt" else "or a list of such prompts"
    raise InvalidValue(Problem(key="prompt", text=problem, advice=advice))


def _check_scored(where: str, content: Any, served: ServedModel) -> None:
    """Raise an error if the request scores the tokens of a text that contains the name of a special token.

    The client would expect a score for a single token, but in a text, the name consists of several ordinary tokens.
    lm-evaluation-harness sends such texts with tokenized_requests=False.
    """
    special = served.trained.tokenizer.special_tokens
    if isinstance(content, str) and (name := next((name for name in special if name in content), None)):
        problem = f"{where}: got {quoted(name)} in a text whose tokens are scored, but this name is ordinary text there"
        advice = f"send token ids instead, with {special[name]} for this token"
        raise InvalidValue(Problem(key="prompt", text=problem, advice=advice))


def _prompt_of(
    system: list[Message],
    turns: list[Message],
    encode: Callable[[list[Message]], list[int]],
    body: ChatBody | CompletionBody,
    served: ServedModel,
) -> tuple[int | None, list[int]]:
    """Return the number of oldest turns that were left out, and the ids of the prompt.

    The number is None if leaving out turns is not allowed.
    """
    if body.truncation == "disabled":
        return None, encode([*system, *turns])
    try:
        return latest_turns(system, turns, encode, served.context, _longest_answer(body, served))
    except TooLong as error:
        raise _too_long(str(error), "messages" if isinstance(body, ChatBody) else "prompt") from error


def _chat_prompt(body: ChatBody, served: ServedModel) -> tuple[int | None, list[int]]:
    """Return the number of oldest turns that were left out, and the ids of the prompt for a conversation.

    The number is None if leaving out turns is not allowed.
    """
    trained = served.trained
    if trained.template is None:
        problem = "messages: the model has no conversation template, so it only continues text"
        raise InvalidValue(Problem(key="messages", text=problem, advice="use /v1/completions"))
    if (count := len(body.messages)) > served.context:  # a message has at least one token
        expected = f"at most {served.context:,}, because the context has that number of tokens"
        raise InvalidValue(Problem(key="messages", found=f"{count:,}", expected=expected))
    with _naming_parameter("messages"):
        messages = [_message(f"messages[{number}]", content) for number, content in enumerate(body.messages)]
        system = [*takewhile(lambda message: message.role == SYSTEM, messages)]
        return _prompt_of(system, messages[len(system) :], trained.ask, body, served)


def _message(where: str, content: Any) -> Message:
    """Return a message of a request. Raises BadInput, or ValueError for a field that would otherwise be ignored."""
    try:
        message, unread = read_message(content, where)
    except ValueError as error:
        # The error's other arguments state the kind of problem. Only prepare_data.py needs them, to count documents.
        raise ValueError(error.args[-1]) from error
    if unread:
        raise ValueError(f"{where}: got {quoted(unread[0])}, wanted only role and content; leave it out")
    check_text(message.content, where)
    return message
