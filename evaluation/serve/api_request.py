"""Requests of OpenAI's API: JSON bodies, checked, as prompts of token ids and the options of their answers."""

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

STOP_STRINGS, STOP_CHARACTERS = 4, 1000  # most of each
MOST_CHOICES = 128  # answers to one prompt, as OpenAI's
ANY_TEXT = ValueCheck(lambda value: isinstance(value, str), "a string")
ONE = ValueCheck(lambda value: type(value) is int and value == 1, "1")
# Parameters that change no answer here.
IGNORED = {
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), ANY_TEXT),
    **dict.fromkeys(("store", "parallel_tool_calls"), boolean()),
    "metadata": ValueCheck(lambda value: isinstance(value, dict), "an object"),
}
# Parameters that change an answer in a way that is not implemented, with the values that ask for nothing.
NEUTRAL = {
    "best_of": ONE,
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ValueCheck(lambda v: is_number(v) and v == 0, "0")),
    **dict.fromkeys(("tools", "functions", "logit_bias", "suffix"), ValueCheck(is_absent, "nothing")),
    **dict.fromkeys(("tool_choice", "function_call"), ValueCheck(lambda value: value == "none", '"none"')),
    "response_format": ValueCheck(lambda value: value == {"type": "text"}, '{"type": "text"}'),
}
NEUTRAL_OF_CHAT = {"n": ONE, "echo": ValueCheck(lambda value: value is False, "false")}


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
    most_answers: int  # most answers to one request: as many as its engine computes and lets wait

    @property
    def context(self) -> int:
        return self.trained.network.config.context_length


def _is_stop(value: Any) -> bool:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > STOP_STRINGS:
        return False
    return all(isinstance(one, str) and 0 < len(one) <= STOP_CHARACTERS for one in given)


STOP = ValueCheck(_is_stop, f"at most {STOP_STRINGS} strings of at most {STOP_CHARACTERS:,} characters")
TEXTS = ValueCheck(lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "texts")


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
    # Of OpenAI's API of responses; "auto": where the context is full, leave out the oldest turns, and say how many.
    truncation: str = attrs.field(default="disabled", validator=one_of("disabled", "auto"))


@attrs.frozen(kw_only=True)
class CompletionBody(AnswerOptions):
    """Body of /v1/completions."""

    prompt: Any
    earlier: list[str] = attrs.field(factory=list, validator=TEXTS)  # before each prompt: texts and their continuations
    n: int = attrs.field(default=1, validator=integer(1, MOST_CHOICES))
    echo: bool = attrs.field(default=False, validator=boolean())
    max_tokens: int = attrs.field(default=16, validator=integer(0))  # as OpenAI's
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
    """One answer to one prompt. A request of several prompts, or with n above 1, has several."""

    prompt: list[int]
    is_first: bool = True  # of the answers to this prompt, whose tokens are counted once
    left_out: int | None = None  # of the oldest turns, if truncation is asked for
    echo: list[int] | None = None  # tokens of the prompt that the answer begins with; of an empty text none
    count: int  # most tokens; 0 only with echo
    sampling: Sampling
    stop: tuple[str, ...]
    alternatives: int | None  # of each token, with probabilities; None: no probabilities
    stream: bool
    include_usage: bool
    is_chat: bool
    repeatable: bool  # has a seed: nothing is reused or computed together, so that other requests change no bit

    @property
    def scores_prompt(self) -> bool:
        """True if the answer states the probabilities of the prompt's tokens as well."""
        return bool(self.echo) and self.alternatives is not None


def read_request(content: bytes, served: ServedModel, *, chat: bool) -> list[AnswerRequest]:
    """Return the answers that a body asks for, in the order of their indices. Raises ApiError."""
    try:
        body = {key: value for key, value in parse_json(content).items() if value is not None}
        neutral = NEUTRAL | (NEUTRAL_OF_CHAT if chat else {})
        for key, check in (IGNORED | neutral).items():
            if key in body and not check.holds(value := body.pop(key)):
                unsupported = "not supported here; " if key in neutral else ""
                problem = f"{key}: {unsupported}got {quoted(value)}, wanted {check.accepted_values}, or leave it out"
                raise ApiError(400, problem, param=key, code="unsupported_parameter" if key in neutral else None)
        wanted = checked(ChatBody, body) if chat else checked(CompletionBody, body)
        if wanted.model != served.name:
            problem = f"the model {quoted(wanted.model)} does not exist; this server has '{served.name}'"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return _chat_answers(wanted, served) if isinstance(wanted, ChatBody) else _text_answers(wanted, served)
    except (ValueError, BadInput) as error:
        param = error.problem.key if isinstance(error, InvalidValue) else ""
        raise ApiError(400, str(error), param=param or None) from error


@contextmanager
def _about(param: str) -> Iterator[None]:
    """Raise errors of a parameter's content, which do not name the parameter, as errors of it."""
    try:
        yield
    except InvalidValue:
        raise
    except (ValueError, BadInput) as error:
        raise InvalidValue(Problem(key=param, text=str(error))) from error


def _chat_answers(wanted: ChatBody, served: ServedModel) -> list[AnswerRequest]:
    if wanted.top_logprobs and not wanted.logprobs:
        raise InvalidValue(Problem(key="top_logprobs", found="a number", expected="logprobs to be true as well"))
    left_out, prompt = _chat_prompt(wanted, served)
    return [attrs.evolve(_answer_request(wanted, served, prompt, None), left_out=left_out)]


def _text_answers(wanted: CompletionBody, served: ServedModel) -> list[AnswerRequest]:
    """Return the answers to each prompt, one prompt after the other."""
    if not wanted.max_tokens and not wanted.echo:
        expected = "at least 1, or echo to be true"
        raise InvalidValue(Problem(key="max_tokens", found="0", expected=expected, cause="the answer would be empty"))
    prompts = _prompts_of(wanted)
    if (answers := len(prompts) * wanted.n) > served.most_answers:
        problem = f"prompt: {len(prompts):,} prompts with n = {wanted.n} are {answers:,} answers"
        most = f"this server draws at most {served.most_answers:,} for one request, by its options --slots and --queue"
        raise InvalidValue(Problem(key="prompt", text=problem, advice=most))
    requests: list[AnswerRequest] = []
    for where, given in prompts.items():
        if wanted.echo and wanted.logprobs is not None:
            _check_scored(where, given, served)
        left_out, prompt = _plain_prompt(where, given, wanted, served)
        first = attrs.evolve(_answer_request(wanted, served, prompt, where), left_out=left_out)
        if wanted.echo:
            first = attrs.evolve(first, echo=prompt if given or wanted.earlier else [])
        for place in range(wanted.n):
            sampling = attrs.evolve(first.sampling, seed=_seed(wanted, place))
            requests.append(attrs.evolve(first, is_first=place == 0, sampling=sampling))
    return requests


def _answer_request(
    wanted: ChatBody | CompletionBody, served: ServedModel, prompt: list[int], where: str | None
) -> AnswerRequest:
    """Return the first answer to a prompt, without echo. `where`: the prompt's name; None: a chat. Raises ApiError."""
    count = _longest_answer(wanted, served)
    if len(prompt) + min(count, 1) > served.context:
        has = "the prompt has" if where in (None, "prompt") else f"{where}: the prompt has"
        both = "prompt and answer together have" if count else "the context has"
        problem = f"{has} {len(prompt):,} tokens; {both} at most {served.context:,} tokens"
        raise _too_long(problem, where and "prompt")
    if wanted.stream_options and not wanted.stream:
        found, expected = "it without a stream", "stream to be true as well"
        raise InvalidValue(Problem(key="stream_options", found=found, expected=expected))
    if isinstance(wanted, ChatBody):
        alternatives = wanted.top_logprobs if wanted.logprobs else None
    else:
        alternatives = wanted.logprobs
    temperature = wanted.temperature if wanted.temperature >= LEAST_TEMPERATURE else 0.0  # its limit; fp32 ends there
    return AnswerRequest(
        prompt=prompt,
        count=min(count, served.context - len(prompt)),
        sampling=Sampling(temperature=temperature, top_p=wanted.top_p, seed=_seed(wanted, 0)),
        stop=(wanted.stop,) if isinstance(wanted.stop, str) else tuple(wanted.stop),
        alternatives=alternatives,
        stream=wanted.stream,
        include_usage=bool(wanted.stream_options.get("include_usage")),
        is_chat=isinstance(wanted, ChatBody),
        repeatable=wanted.seed is not None,
    )


def _longest_answer(wanted: ChatBody | CompletionBody, served: ServedModel) -> int:
    """Return the most tokens that an answer may have, if the context has room for them."""
    given = wanted.max_tokens
    if isinstance(wanted, ChatBody) and wanted.max_completion_tokens is not None:
        if given not in (None, wanted.max_completion_tokens):
            found = f"{given} and max_completion_tokens {wanted.max_completion_tokens}"
            raise InvalidValue(Problem(key="max_tokens", found=found, expected="one of them"))
        given = wanted.max_completion_tokens
    return served.longest_answer if given is None else min(given, served.longest_answer)


def _too_long(problem: str, param: str | None) -> ApiError:
    return ApiError(400, problem, param=param, code="context_length_exceeded")


def _seed(wanted: AnswerOptions, place: int) -> int:
    """Return the seed of an answer. `place`: among the answers to its prompt; prompts do not change each other's."""
    return secrets.randbits(53) if wanted.seed is None else wanted.seed + place


def _prompts_of(wanted: CompletionBody) -> dict[str, Any]:
    """Return the prompts of a request, by their names in errors: a text or token ids, or a list of these."""
    given = wanted.prompt
    if isinstance(given, list) and given and not all(type(one) is int for one in given):
        return {f"prompt[{number}]": one for number, one in enumerate(given)}
    return {"prompt": given}


def _plain_prompt(where: str, given: Any, wanted: CompletionBody, served: ServedModel) -> tuple[int | None, list[int]]:
    """Return how many of the earlier texts are left out, None if all have to fit, and the ids of a prompt."""
    if isinstance(given, str):
        texts = [*wanted.earlier, given]
        with _about("prompt"):
            for text in texts:
                check_text(text, where)
        turns = [Message((USER, ASSISTANT)[number % 2], text) for number, text in enumerate(texts)]
        return _prompt_of(
            [], turns, lambda turns: served.trained.encode("".join(said for _, said in turns)), wanted, served
        )
    if wanted.earlier:
        raise InvalidValue(Problem(key="earlier", found="texts before token ids", expected=f"{where} to be a string"))
    ids = integer(0, served.trained.network.config.vocab_size - 1)
    if isinstance(given, list) and given and all(map(ids.holds, given)):
        return None, given
    problem = f"{where}: got {quoted(given)}, wanted a string, or a list of token ids, each {ids.accepted_values}"
    advice = "" if where != "prompt" else "or a list of such prompts"
    raise InvalidValue(Problem(key="prompt", text=problem, advice=advice))


def _check_scored(where: str, given: Any, served: ServedModel) -> None:
    """Refuse a text that is scored and spells a special token: its client would count one token, and here are several.

    lm-evaluation-harness does so with tokenized_requests=False.
    """
    special = served.trained.tokenizer.special_tokens
    if isinstance(given, str) and (name := next((name for name in special if name in given), None)):
        problem = f"{where}: got {quoted(name)} in a text whose tokens are scored; in a text it is ordinary characters"
        advice = f"send token ids instead, with {special[name]} for it"
        raise InvalidValue(Problem(key="prompt", text=problem, advice=advice))


def _prompt_of(
    system: list[Message],
    turns: list[Message],
    encode: Callable[[list[Message]], list[int]],
    wanted: ChatBody | CompletionBody,
    served: ServedModel,
) -> tuple[int | None, list[int]]:
    """Return how many of the oldest turns are left out, None if all have to fit, and the ids of the prompt."""
    if wanted.truncation == "disabled":
        return None, encode([*system, *turns])
    try:
        return latest_turns(system, turns, encode, served.context, _longest_answer(wanted, served))
    except TooLong as error:
        raise _too_long(str(error), "messages" if isinstance(wanted, ChatBody) else "prompt") from error


def _chat_prompt(wanted: ChatBody, served: ServedModel) -> tuple[int | None, list[int]]:
    trained = served.trained
    if trained.template is None:
        problem = "messages: the model has no conversation template: it continues text"
        raise InvalidValue(Problem(key="messages", text=problem, advice="use /v1/completions"))
    if (count := len(wanted.messages)) > served.context:  # of at least a token each
        expected = f"at most {served.context:,}, as the context has tokens"
        raise InvalidValue(Problem(key="messages", found=f"{count:,}", expected=expected))
    with _about("messages"):
        messages = [_message(f"messages[{number}]", given) for number, given in enumerate(wanted.messages)]
        system = [*takewhile(lambda message: message.role == SYSTEM, messages)]
        return _prompt_of(system, messages[len(system) :], trained.ask, wanted, served)


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
