"""Conversation template: messages as the text that a model continues, as token ids, and the ids that count in the loss.

A template is a Jinja text as Hugging Face's tokenizers have one (`chat_template`), so other programs render the same.
It is rendered with a placeholder for each content: the text of a message is ordinary and never becomes a turn token.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import attrs

from common.errors import BadInput, refusing
from common.json_files import read_regular
from tokens.tokenizer.rendering import PLACE, TEMPLATE_CHARACTERS, RenderedText, TemplateInput, render

if TYPE_CHECKING:
    from tokens.tokenizer.tokenizer import Tokenizer

ROLES = SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
TURN_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # of TURNS
TURN_TOKEN = re.compile(r"<\|[^\s<>|]+\|>")  # in what a template of a file renders
SUFFIX = ".jinja"  # of a file
ODD = ' Is "A"\n<b>& c? '  # what a filter would change
REASONING = "</think>"  # at which templates divide an answer
PROBE_END = "</s>"  # the end of text of these conversations
# Questions and answers by which a template is checked when it is loaded
PROBES = (("1", "2"), (ODD, ODD), ("/no_think 1", f"<think>\n2\n{REASONING}\n\n3"))


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
        return self._encode(tokenizer, messages, begins_answer=True)[0]

    def ends(self, tokenizer: "Tokenizer") -> list[int]:
        """Return the special tokens that end two answers, the last one too; without one no model learns to stop."""
        ids, weights = self._encode(tokenizer, [Message(USER, "a"), Message(ASSISTANT, "a")] * 2)
        special = {*tokenizer.special_tokens.values()}  # without white space before them
        return [token for token, weight in zip(ids, weights, strict=True) if weight and token in special]

    def encode(self, tokenizer: "Tokenizer", messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return ids, and weights: 1 for answers and the special token that ends each.

        Raises BadInput for what the template refuses, and unless the ids before each answer are its `prompt`.
        """
        return self._encode(tokenizer, messages, asks_for_answers=True)

    def check(self) -> str:
        """Return all that the template writes around messages of conversations of several kinds.

        Raises BadInput unless it shows each message once, and asks for each answer with the text after which that is
        trained: for the first, a middle and the last one, with and without a system message. A template may refuse a
        system message, and contents that look like reasoning.
        """
        text = ""
        if self.text in OURS:
            return text
        for (question, answer), with_system, answers in itertools.product(PROBES, (False, True), (1, 2, 3)):
            turns = [Message(USER, question), Message(ASSISTANT, answer)] * answers
            turns = [Message(SYSTEM, question)] * with_system + turns
            try:
                self.rendered(PROBE_END, turns)
            except BadInput:
                if with_system or REASONING in answer:
                    continue
                raise
            text += self.rendered(PROBE_END, turns, asks_for_answers=True).text
            text += self.rendered(PROBE_END, turns[:-1], begins_answer=True).text
        return text

    def _encode(
        self, tokenizer: "Tokenizer", messages: Sequence[Message], **options: bool
    ) -> tuple[list[int], list[int]]:
        """Return ids and weights; `options` are those of `rendered`."""
        ids, weights = list[int](), list[int]()

        def add(new: list[int], weight: int) -> None:
            ids.extend(new)
            weights.extend([weight] * len(new))

        text, answered = "", False  # not encoded yet; whether an answer comes before it, but for white space
        special = "|".join(re.escape(token) for token in sorted(tokenizer.special_tokens, key=len, reverse=True))
        rendered = self.rendered(tokenizer.end_of_text, messages, **options)
        for part in re.split(f"({special}|{PLACE.format('[0-9]+')})", rendered.text):
            number = int(part[1:-1]) if part[:1] == PLACE[0] and part[-1:] == PLACE[-1] else None
            if number is None and part not in tokenizer.special_tokens:
                text, answered = text + part, answered and not part.strip()
            elif number is not None and messages[number].role != ASSISTANT:
                # One text with what stands around it, as other programs encode it.
                text, answered = text + rendered.contents[number], False
            else:
                ends = answered and number is None  # a turn, with the white space before it
                add(tokenizer.encode(text).tolist(), int(ends))
                if number is None:
                    add([tokenizer.special_tokens[part]], int(ends))
                else:
                    add(tokenizer.encode(rendered.contents[number]).tolist(), 1)
                text, answered = "", number is not None
        add(tokenizer.encode(text).tolist(), 0)
        return ids, weights

    def rendered(
        self,
        end_of_text: str,
        messages: Sequence[Message],
        *,
        begins_answer: bool = False,
        asks_for_answers: bool = False,
    ) -> RenderedText:
        """Return a conversation as text. Raises BadInput as `render`; `asks_for_answers`: compare it with prompts."""
        answers = [number for number, message in enumerate(messages) if message.role == ASSISTANT]
        is_ours = self.text in OURS  # a test compares its prompts, which depend on no content
        conversation = TemplateInput(
            template=self.text,
            values=dict.fromkeys(("bos_token", "eos_token"), end_of_text) | {**self.variables},
            messages=[[*message] for message in messages],
            begins_answer=begins_answer,
            answers=answers if asks_for_answers and not is_ours else [],
        )
        return render(conversation, trusted=is_ours)


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
OURS = frozenset(template.text for template in TEMPLATES.values())


def load_template(name: str) -> Template:
    """Return the template "turns" or "alpaca", or a file's. Raises BadInput unless it renders each message once."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not name.endswith(SUFFIX):
        raise BadInput(f"template '{name}' is unknown; wanted {', '.join(TEMPLATES)} or a {SUFFIX} file")
    with refusing(f"{name}: cannot be read", kinds=(OSError, ValueError)):
        template = Template(read_regular(Path(name), 4 * TEMPLATE_CHARACTERS).decode("utf-8-sig"))
    if "strftime_now" in template.text:
        raise BadInput(f"{name}: asks for the date, so its tokens would differ from day to day; write one instead")
    turns = [Message(role, ODD) for role in (USER, ASSISTANT, USER)]
    with refusing(name, kinds=(BadInput,)):  # new special tokens get their ids in the order in which they appear here
        text = template.rendered("", turns, begins_answer=True).text + template.rendered("", turns[:2]).text
        with suppress(BadInput):  # it may refuse a system message
            some = [Message(role, "1") for role in (SYSTEM, USER, ASSISTANT, USER)]
            text += template.rendered("", some).text
        text += template.check()
    return Template(template.text, tuple(dict.fromkeys(TURN_TOKEN.findall(text))))
