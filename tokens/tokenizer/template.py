"""Conversation template: turns messages into the text that a model continues, and into token ids with loss weights.

A template is written in Jinja, as in Hugging Face's tokenizers (`chat_template`), so other programs render the same
text. It is rendered with a placeholder in place of each message's content, because the content is ordinary text that
must never become a turn token.
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
TURN_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # the turn tokens of the template "turns"
TURN_TOKEN = re.compile(r"<\|[^\s<>|]+\|>")  # matches turn tokens in text that a template from a file has written
SUFFIX = ".jinja"  # end of a template file's name
ODD = ' Is "A"\n<b>& c? '  # a text that a filter, such as trim or escape, would change
REASONING = "</think>"  # some templates divide an answer here
PROBE_END = "</s>"  # used as the end of text when PROBES are rendered
# Questions and answers with which a template is checked when it is loaded
PROBES = (("1", "2"), (ODD, ODD), ("/no_think 1", f"<think>\n2\n{REASONING}\n\n3"))


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # one of ROLES
    content: str


@attrs.frozen
class Template:
    """A conversation template."""

    text: str  # Jinja
    turn_tokens: tuple[str, ...] = ()  # special tokens that the tokenizer must have for this template
    # Values of variables such as eos_token. By default, bos_token and eos_token are the tokenizer's end of text.
    variables: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    def prompt(self, tokenizer: "Tokenizer", messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation followed by the beginning of an answer. Raises BadInput like `encode`."""
        return self._encode(tokenizer, messages, begins_answer=True)[0]

    def ends(self, tokenizer: "Tokenizer") -> list[int]:
        """Return the special tokens that end the two answers of a short conversation.

        A model learns to stop only if such a token follows every answer.
        """
        ids, weights = self._encode(tokenizer, [Message(USER, "a"), Message(ASSISTANT, "a")] * 2)
        special = {*tokenizer.special_tokens.values()}  # white space before a special token also has a weight
        return [token for token, weight in zip(ids, weights, strict=True) if weight and token in special]

    def encode(self, tokenizer: "Tokenizer", messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation and their weights: 1 for an answer and the special token that ends it.

        Raises BadInput if the template refuses the messages, or if the ids before an answer differ from its `prompt`.
        """
        return self._encode(tokenizer, messages, asks_for_answers=True)

    def check(self) -> str:
        """Return everything that the template writes around the messages of several kinds of conversations.

        Raises BadInput if the template does not show each message exactly once, or if the prompt for an answer differs
        from the text that precedes that answer in training. This is checked for the first, a middle and the last
        answer, with and without a system message. A template may refuse system messages and answers that look like
        reasoning.
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
        """Return ids and weights. `options` are the options of `rendered`."""
        ids, weights = list[int](), list[int]()

        def add(new_ids: list[int], weight: int) -> None:
            ids.extend(new_ids)
            weights.extend([weight] * len(new_ids))

        text = ""  # text that is not encoded yet
        follows_answer = False  # whether `text` follows an answer and is only white space so far
        special = "|".join(re.escape(token) for token in sorted(tokenizer.special_tokens, key=len, reverse=True))
        rendered = self.rendered(tokenizer.end_of_text, messages, **options)
        for part in re.split(f"({special}|{PLACE.format('[0-9]+')})", rendered.text):
            number = int(part[1:-1]) if part[:1] == PLACE[0] and part[-1:] == PLACE[-1] else None
            if number is None and part not in tokenizer.special_tokens:
                text, follows_answer = text + part, follows_answer and not part.strip()
            elif number is not None and messages[number].role != ASSISTANT:
                # This content and the text around it are encoded as one text, as in other programs.
                text, follows_answer = text + rendered.contents[number], False
            else:
                # A special token, together with any white space before it, ends an answer.
                ends = follows_answer and number is None
                add(tokenizer.encode(text).tolist(), int(ends))
                if number is None:
                    add([tokenizer.special_tokens[part]], int(ends))
                else:
                    add(tokenizer.encode(rendered.contents[number]).tolist(), 1)
                text, follows_answer = "", number is not None
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
        """Return a conversation as text. Raises BadInput like `render`.

        If `asks_for_answers` is true, the text before each answer must equal the prompt that asks for this answer.
        """
        answers = [number for number, message in enumerate(messages) if message.role == ASSISTANT]
        is_ours = self.text in OURS  # our prompts do not depend on the messages, so a test checks them once
        conversation = TemplateInput(
            template=self.text,
            values=dict.fromkeys(("bos_token", "eos_token"), end_of_text) | {**self.variables},
            messages=[[*message] for message in messages],
            begins_answer=begins_answer,
            answers=answers if asks_for_answers and not is_ours else [],
        )
        return render(conversation, trusted=is_ours)


# Name for prepare_data.py --template -> template
TEMPLATES = {
    "turns": Template(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        TURN_TOKENS,
    ),
    # Stanford's Alpaca (Taori et al. 2023), which gpjt's comparisons use; a system message replaces its introduction
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
    """Return the template "turns" or "alpaca", or a template that is read from a file.

    Raises BadInput unless the template renders each message once.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not name.endswith(SUFFIX):
        raise BadInput(f"template '{name}' is unknown; wanted {', '.join(TEMPLATES)} or a {SUFFIX} file")
    with refusing(f"{name}: cannot be read", kinds=(OSError, ValueError)):
        template = Template(read_regular(Path(name), 4 * TEMPLATE_CHARACTERS).decode("utf-8-sig"))
    if "strftime_now" in template.text:
        raise BadInput(
            f"{name}: contains the current date, so its tokens would change every day; write a fixed date instead"
        )
    turns = [Message(role, ODD) for role in (USER, ASSISTANT, USER)]
    with refusing(name, kinds=(BadInput,)):  # new special tokens get their ids in the order in which they occur here
        text = template.rendered("", turns, begins_answer=True).text + template.rendered("", turns[:2]).text
        with suppress(BadInput):  # the template may refuse a system message
            system_turns = [Message(role, "1") for role in (SYSTEM, USER, ASSISTANT, USER)]
            text += template.rendered("", system_turns).text
        text += template.check()
    return Template(template.text, tuple(dict.fromkeys(TURN_TOKEN.findall(text))))
