"""Requests of OpenAI's API: JSON bodies, checked, as a prompt of token ids and the options of its answer."""

import re
import secrets
from typing import Any

import attrs

from common.checks import ValueCheck, boolean, checked, integer, is_absent, number, optional, text
from common.errors import LARGEST_INTEGER, BadInput, quoted
from common.json_files import check_text, is_number, parse_json
from evaluation.command_line import LEAST_TEMPERATURE
from evaluation.shared.load import Trained
from model.generate import Sampling
from tokens.documents.messages import read_message
from tokens.tokenizer.template import Message

STOP_STRINGS, STOP_CHARACTERS = 4, 1000  # most of each
ANY_TEXT = ValueCheck(lambda value: isinstance(value, str), "a string")
# Parameters that change no answer here.
IGNORED = {
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), ANY_TEXT),
    **dict.fromkeys(("store", "parallel_tool_calls"), boolean()),
    "metadata": ValueCheck(lambda value: isinstance(value, dict), "an object"),
}
# Parameters that change an answer in a way that is not implemented, with the values that ask for nothing.
NEUTRAL = {
    **dict.fromkeys(("n", "best_of"), ValueCheck(lambda value: type(value) is int and value == 1, "1")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ValueCheck(lambda v: is_number(v) and v == 0, "0")),
    **dict.fromkeys(("tools", "functions", "logit_bias", "suffix"), ValueCheck(is_absent, "nothing")),
    **dict.fromkeys(("tool_choice", "function_call"), ValueCheck(lambda value: value == "none", '"none"')),
    "response_format": ValueCheck(lambda value: value == {"type": "text"}, '{"type": "text"}'),
    "echo": ValueCheck(lambda value: value is False, "false"),
}


class ApiError(Exception):
    """A refusal or failure of a request, in the API's own form."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@attrs.frozen(kw_only=True)
class ServedModel:
    """A model as clients see it."""

    trained: Trained
    name: str
    longest_answer: int  # most tokens of an answer

    @property
    def context(self) -> int:
        return self.trained.network.config.context_length


def _is_stop(value: Any) -> bool:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > STOP_STRINGS:
        return False
    return all(isinstance(one, str) and 0 < len(one) <= STOP_CHARACTERS for one in given)


STOP = ValueCheck(_is_stop, f"at most {STOP_STRINGS} strings of at most {STOP_CHARACTERS:,} characters")


def _is_stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or not {*value} <= {"include_usage", "include_obfuscation"}:
        return False
    usage, obfuscation = (value.get(name) for name in ("include_usage", "include_obfuscation"))
    return (usage is None or type(usage) is bool) and (obfuscation is None or obfuscation is False)


STREAM_OPTIONS = ValueCheck(_is_stream_options, '{"include_usage": true} or {"include_usage": false}')


@attrs.frozen(kw_only=True)
class AnswerOptions:
    """Parameters of both forms."""

    model: str = attrs.field(validator=text())
    max_tokens: int | None = attrs.field(default=None, validator=optional(integer(1)))
    temperature: float = attrs.field(default=1.0, validator=number(0, 2))
    top_p: float = attrs.field(default=1.0, validator=number(0, 1, above=True))
    seed: int | None = attrs.field(default=None, validator=optional(integer(-LARGEST_INTEGER)))
    stop: str | list[str] = attrs.field(factory=list, validator=STOP)
    stream: bool = attrs.field(default=False, validator=boolean())
    stream_options: dict[str, bool] = attrs.field(factory=dict, validator=STREAM_OPTIONS)


@attrs.frozen(kw_only=True)
class CompletionBody(AnswerOptions):
    """Body of /v1/completions."""

    prompt: Any
    max_tokens: int = attrs.field(default=16, validator=integer(1))  # as OpenAI's
    logprobs: int | None = attrs.field(default=None, validator=optional(integer(0, 20)))


@attrs.frozen(kw_only=True)
class ChatBody(AnswerOptions):
    """Body of /v1/chat/completions."""

    messages: list[Any] = attrs.field(
        validator=ValueCheck(lambda value: isinstance(value, list) and value != [], "a list of messages")
    )
    max_completion_tokens: int | None = attrs.field(default=None, validator=optional(integer(1)))
    logprobs: bool = attrs.field(default=False, validator=boolean())
    top_logprobs: int = attrs.field(default=0, validator=integer(0, 20))


@attrs.frozen(kw_only=True)
class AnswerRequest:
    prompt: list[int]
    count: int  # most tokens
    sampling: Sampling
    stop: tuple[str, ...]
    alternatives: int | None  # of each token, with probabilities; None: no probabilities
    stream: bool
    include_usage: bool
    is_chat: bool
    repeatable: bool  # has a seed: nothing is reused or computed together, so that other requests change no bit


def read_request(content: bytes, served: ServedModel, *, chat: bool) -> AnswerRequest:
    """Return the request of a body. Raises ApiError."""
    try:
        body = {key: value for key, value in parse_json(content).items() if value is not None}
        for key, check in (IGNORED | NEUTRAL).items():
            if key in body and not check.holds(value := body.pop(key)):
                unsupported = "not supported here; " if key in NEUTRAL else ""
                problem = f"{key}: {unsupported}got {quoted(value)}, wanted {check.wanted}, or leave it out"
                raise ApiError(400, problem, param=key, code="unsupported_parameter" if key in NEUTRAL else None)
        wanted = checked(ChatBody, body) if chat else checked(CompletionBody, body)
        if wanted.model != served.name:
            problem = f"the model {quoted(wanted.model)} does not exist; this server has '{served.name}'"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return _answer_request(wanted, served)
    except (ValueError, BadInput) as error:
        found = re.match(r"(?:(?:unknown )?key '(\w+)'|(\w+)(?:\[\d+\])?:)", str(error))
        raise ApiError(400, str(error), param=found and (found[1] or found[2])) from error


def _answer_request(wanted: ChatBody | CompletionBody, served: ServedModel) -> AnswerRequest:
    if isinstance(wanted, ChatBody):
        prompt, alternatives = _chat_prompt(wanted, served), wanted.top_logprobs if wanted.logprobs else None
        count = wanted.max_completion_tokens or wanted.max_tokens or served.context
        if wanted.max_tokens not in (None, count):
            raise ValueError(
                f"max_tokens: got {wanted.max_tokens} and max_completion_tokens {count}, wanted one of them"
            )
        if wanted.top_logprobs and not wanted.logprobs:
            raise ValueError("top_logprobs: got a number, wanted logprobs to be true as well")
    else:
        prompt, alternatives, count = _plain_prompt(wanted, served), wanted.logprobs, wanted.max_tokens
    if len(prompt) >= served.context:
        problem = f"the prompt has {len(prompt):,} tokens; prompt and answer together have at most {served.context:,}"
        raise ApiError(400, f"{problem} tokens", code="context_length_exceeded")
    if wanted.stream_options and not wanted.stream:
        raise ValueError("stream_options: got it without a stream, wanted stream to be true as well")
    seed = secrets.randbits(53) if wanted.seed is None else wanted.seed
    temperature = wanted.temperature if wanted.temperature >= LEAST_TEMPERATURE else 0.0  # its limit; fp32 ends there
    return AnswerRequest(
        prompt=prompt,
        count=min(count, served.longest_answer, served.context - len(prompt)),
        sampling=Sampling(temperature=temperature, top_p=wanted.top_p, seed=seed),
        stop=(wanted.stop,) if isinstance(wanted.stop, str) else tuple(wanted.stop),
        alternatives=alternatives,
        stream=wanted.stream,
        include_usage=bool(wanted.stream_options.get("include_usage")),
        is_chat=isinstance(wanted, ChatBody),
        repeatable=wanted.seed is not None,
    )


def _plain_prompt(wanted: CompletionBody, served: ServedModel) -> list[int]:
    given = wanted.prompt
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        check_text(given, "prompt")
        return served.trained.encode(given)
    known = integer(0, served.trained.network.config.vocab_size - 1)
    if isinstance(given, list) and given and all(known.holds(one) for one in given):
        return given
    raise ValueError(f"prompt: got {quoted(wanted.prompt)}, wanted one string, or token ids, each {known.wanted}")


def _chat_prompt(wanted: ChatBody, served: ServedModel) -> list[int]:
    trained = served.trained
    if trained.template is None:
        raise ValueError("messages: the model has no conversation template: it continues text; use /v1/completions")
    if (count := len(wanted.messages)) > served.context:  # of at least a token each
        raise ValueError(f"messages: got {count:,}, wanted at most {served.context:,}, as the context has tokens")
    messages = [_message(f"messages[{number}]", given) for number, given in enumerate(wanted.messages)]
    return trained.template.prompt(trained.tokenizer, messages)


def _message(where: str, given: Any) -> Message:
    """Return a message of a request. Raises ValueError for a field that would be dropped, and BadInput."""
    try:
        message, unread = read_message(given, where)
    except ValueError as error:
        raise ValueError(error.args[-1]) from error  # without the kind of the problem, by which documents are counted
    if unread:
        raise ValueError(f"{where}: got {quoted(unread[0])}, wanted role and content alone; leave it out")
    check_text(message.content, where)
    return message
