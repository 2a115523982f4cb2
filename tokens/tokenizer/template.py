"""Conversation template: messages as the text that a model continues, as token ids, and the ids that count in the loss.

A template is a Jinja text as Hugging Face's tokenizers have one (`chat_template`), so other programs render the same.
It is rendered with a placeholder for each content: the text of a message is ordinary and never becomes a turn token.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import attrs

from common.errors import BadInput, refusing
from common.json_files import read_regular

if TYPE_CHECKING:
    from jinja2 import Template as JinjaTemplate

    from tokens.tokenizer.tokenizer import Tokenizer

ROLES = SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
PLACE = "\ue000{}\ue001"  # in place of the content of a message, with its number
TURN_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # of TURNS
TURN_TOKEN = re.compile(r"<\|[^\s<>|]+\|>")  # in what a template of a file renders
SUFFIX = ".jinja"  # of a file
ODD = ' Is "A"\n<b>& c? '  # what a filter would change


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # one of ROLES
    content: str


@attrs.frozen
class Template:
    """A conversation template."""

    text: str  # Jinja
    turn_tokens: tuple[str, ...] = ()  # special tokens that a tokenizer must have for it
    variables: Mapping[str, str] = attrs.field(factory=dict, hash=False)  # eos_token and such; by default end of text

    def prompt(self, tokenizer: "Tokenizer", messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, and of the beginning of an answer to it. Raises BadInput as `encode`."""
        return self.encode(tokenizer, messages, begins_answer=True)[0]

    def ends(self, tokenizer: "Tokenizer") -> list[int]:
        """Return the special tokens that end two answers, the last one too; without one no model learns to stop."""
        ids, weights = self.encode(tokenizer, [Message(USER, "a"), Message(ASSISTANT, "a")] * 2)
        special = {*tokenizer.special_tokens.values()}  # without white space before them
        return [token for token, weight in zip(ids, weights, strict=True) if weight and token in special]

    def encode(
        self, tokenizer: "Tokenizer", messages: Sequence[Message], *, begins_answer: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return ids, and weights: 1 for answers and the special token that ends each. Raises BadInput."""
        ids, weights = list[int](), list[int]()

        def add(new: list[int], weight: int) -> None:
            ids.extend(new)
            weights.extend([weight] * len(new))

        text, answered = "", False  # not encoded yet; whether an answer comes before it, but for white space
        special = "|".join(re.escape(token) for token in sorted(tokenizer.special_tokens, key=len, reverse=True))
        rendered, messages = self.render(tokenizer.end_of_text, messages, begins_answer=begins_answer)
        for part in re.split(f"({special}|{PLACE.format('[0-9]+')})", rendered):
            is_place = part[:1] == PLACE[0] and part[-1:] == PLACE[-1]
            message = messages[int(part[1:-1])] if is_place else None
            if message is None and part not in tokenizer.special_tokens:
                text, answered = text + part, answered and not part.strip()
            elif message is not None and message.role != ASSISTANT:
                # One text with what stands around it, as other programs encode it.
                text, answered = text + message.content, False
            else:
                ends = answered and message is None  # a turn, with the white space before it
                add(tokenizer.encode(text).tolist(), int(ends))
                if message is None:
                    add([tokenizer.special_tokens[part]], int(ends))
                else:
                    add(tokenizer.encode(message.content).tolist(), 1)
                text, answered = "", message is not None
        add(tokenizer.encode(text).tolist(), 0)
        return ids, weights

    def render(
        self, end_of_text: str, messages: Sequence[Message], *, begins_answer: bool = False
    ) -> tuple[str, list[Message]]:
        """Return a conversation with a PLACE for each content, and the messages, trimmed where the template trims them.

        Raises BadInput unless there is a place for each, and they fill in to what the template makes of the messages.
        """
        ends = dict.fromkeys(("bos_token", "eos_token"), end_of_text)
        # As transformers gives them
        values = {"tools": None, "documents": None, "add_generation_prompt": begins_answer, **ends, **self.variables}
        places = [Message(each.role, PLACE.format(number)) for number, each in enumerate(messages)]
        with refusing("the conversation template", kinds=(Exception,)):  # a program: it raises anything
            render = _compiled(self.text).render
            text, wanted = (render(messages=[*map(Message._asdict, each)], **values) for each in (places, messages))
        parts = re.split(PLACE.format("([0-9]+)"), text)
        numbers = [int(number) for number in parts[1::2]]
        found = Counter(numbers)
        for number, message in enumerate(messages, 1):
            if (count := found[number - 1]) != 1:
                where = f"message {number} ({message.role})"
                raise BadInput(f"the conversation template has {where} {count} times, wanted each message once")
        at, shown = len(parts[0]), [*messages]
        for number, after in zip(numbers, parts[2::2], strict=True):
            said = messages[number].content if number < len(messages) else "\0"  # a place in the template's own text
            ways = (said, said.lstrip(), said.rstrip(), said.strip())
            if not (fitting := [way for way in ways if wanted.startswith(way + after, at)]):
                break
            shown[number] = messages[number]._replace(content=fitting[0])
            at += len(fitting[0] + after)
        else:
            if at == len(wanted) and wanted.startswith(parts[0]):
                return text, shown
        raise BadInput("the conversation template changes the text of messages; wanted it as it is, or trimmed")


@functools.lru_cache
def _compiled(text: str) -> "JinjaTemplate":
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(problem: str) -> None:
        raise ValueError(problem)

    # As transformers has it
    loops = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    answers = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")  # around them, for a mask; changes no text
    return environment.from_string(answers.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", text))


# By the name that prepare_data.py --template takes.
TEMPLATES = {
    "turns": Template(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        TURN_TOKENS,
    ),
    # Stanford's Alpaca (Taori et al. 2023), as gpjt's comparisons use; a system message replaces its first sentence
    "alpaca": Template(
        "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}Below is an "
        "instruction that describes a task. Write a response that appropriately completes the request.{% endif %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '\n\n### Instruction:\n' + message['content'] }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ '\n\n### Response:\n' + message['content'] + eos_token }}"
        "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
    ),
}


def load_template(name: str) -> Template:
    """Return the template "turns" or "alpaca", or a file's. Raises BadInput unless it renders each message once."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not name.endswith(SUFFIX):
        raise BadInput(f"template '{name}' is unknown; wanted {', '.join(TEMPLATES)} or a {SUFFIX} file")
    with refusing(f"{name}: cannot be read", kinds=(OSError, ValueError)):
        template = Template(read_regular(Path(name)).decode("utf-8-sig"))
    if "strftime_now" in template.text:
        raise BadInput(f"{name}: asks for the date, so its tokens would differ from day to day; write one instead")
    turns = [Message(role, ODD) for role in (USER, ASSISTANT, USER)]
    with refusing(name, kinds=(BadInput,)):
        text = template.render("", turns, begins_answer=True)[0] + template.render("", turns[:2])[0]
    with suppress(BadInput):  # it may refuse a system's message
        text += template.render("", [Message(role, "1") for role in (SYSTEM, USER, ASSISTANT, USER)])[0]
    return Template(template.text, tuple(dict.fromkeys(TURN_TOKEN.findall(text))))
