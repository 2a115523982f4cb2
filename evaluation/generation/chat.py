"""Chat: a conversation with a model at a terminal, or the answer to one message."""

import os
import re
import shutil
import signal
import unicodedata
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from common.errors import BadInput, refusing
from common.files import writing
from common.json_files import JsonLog
from common.output import note, show
from common.text import nearest, printable
from evaluation.command_line import ChatCommand
from evaluation.generation.generated_text import GeneratedText, load_for_generation, print_parts, sampling_of
from evaluation.generation.prompts import forgotten, latest_turns, read_prompt
from evaluation.shared.load import Trained
from model.generate import Prefix, Sampling
from tokens.tokenizer.template import ASSISTANT, SYSTEM, USER, Message

HELP = {
    "/reset": "forget the conversation",
    "/save FILE": "add it to a .jsonl file of conversations, for prepare_data.py",
    "/help": "this list; a space before a / makes it a message",
}


class Conversation:
    """Messages of a user and a model, as one plain text without a template; their keys and values are kept."""

    def __init__(self, trained: Trained, longest: int, system: str | None = None):
        """`longest`: tokens of an answer; `system`: first message, which stays. Raises BadInput where it cannot be."""
        self.trained, self.longest = trained, longest
        self.context = trained.network.config.context_length
        self.system = [] if system is None else [Message(SYSTEM, system)]
        self.turns: list[Message] = []  # of the user and the model, alternately
        self.unseen = 0  # of them, the first ones, which do not fit the context any more
        self.answers = 0  # answers begun
        self.latest: GeneratedText | None = None  # the last one of them
        self.cut = 0  # answers in `turns` that the model has not ended
        self._prefix = Prefix(trained.network)
        if self.system and trained.template is None:
            raise BadInput(f"{trained.place.path}: has no conversation template, and so no place for a system message")
        self._prompt(Message(USER, " "))

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer in parts of whole characters; they are kept, interrupted or not. Raises BadInput."""
        question, answer = Message(USER, text), ""
        ids = self._prompt(question)
        longest, ends = min(self.longest, self.context - len(ids)), self.trained.stop_ids
        self.answers += 1
        self.latest = GeneratedText(self.trained, ids, longest, sampling, stop=ends, prefix=self._prefix)
        try:
            for part in self.latest:
                answer += part
                yield part
        finally:
            if answer:
                self.turns += question, Message(ASSISTANT, answer)
                self.cut += self.latest.finish != "stop"

    def interrupt(self, *_: Any) -> None:
        """End the answer before its next token. A signal handler: a line in print is not cut."""
        if self.latest is not None:
            self.latest.interrupted = True

    def _prompt(self, question: Message) -> list[int]:
        """Return the ids of the latest turns that leave room to the answer. Raises BadInput for too long a question."""
        turns = [*self.turns[self.unseen :], question]
        left_out, ids = latest_turns(self.system, turns, self.trained.ask, self.context, self.longest)
        self.unseen += left_out
        return ids


def run(command: ChatCommand) -> None:
    """Print answers to typed messages until the input ends, or to one message."""
    typed = command.prompt is None and os.isatty(0)
    message = "" if typed else read_prompt(command.prompt)
    conversation = Conversation(load_for_generation(command), command.tokens, command.system)
    if conversation.trained.template is None:
        show(note("the model has no conversation template: it continues the text"))
    if not typed:
        print_parts(conversation.answer(message, sampling_of(command, 0)))
        return
    with suppress(ImportError):  # input() edits lines by it
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # several lines at once are one message
    show(conversation.trained.place.title)
    show("Ctrl-C ends an answer, Ctrl-D the program; /help lists commands.")
    while True:
        try:
            signal.signal(signal.SIGINT, _interrupt_once)
            respond(conversation, input("> "), sampling_of(command, conversation.answers))
        except KeyboardInterrupt:
            show("", "Ctrl-D ends the program.")
        except BadInput as problem:
            show(*str(problem).split("\n"))
        except EOFError:
            show("")
            break


def respond(conversation: Conversation, typed: str, sampling: Sampling) -> None:
    """Carry out a command, or print the answer to a message until it ends, or Ctrl-C. Raises BadInput."""
    message = typed.strip()
    if re.match(r"/\w*(\s|$)", typed):
        show(*obey(conversation, *message.split(maxsplit=1)).split("\n"))
    elif message:
        before, unseen = len(conversation.turns), conversation.unseen
        signal.signal(signal.SIGINT, conversation.interrupt)
        with closing(conversation.answer(message, sampling)) as parts:
            print_parts(wrapped(parts, shutil.get_terminal_size().columns) if os.isatty(1) else parts)
            if conversation.latest is not None and conversation.latest.finish == "length":
                show(note(f"the answer is cut at {conversation.longest:,} tokens, or where the context ends"))
        if len(conversation.turns) == before:
            show(note("no answer; the message is forgotten"))
        if conversation.unseen > unseen == 0:
            show(note(f"{forgotten(conversation.context)}"))


def obey(conversation: Conversation, name: str, value: str = "") -> str:
    if name == "/help":
        return "\n".join(f"{usage:<12}{text}" for usage, text in HELP.items())
    if name == "/reset":
        conversation.turns, conversation.unseen, conversation.cut = [], 0, 0
        return "The conversation is forgotten."
    if name != "/save":
        raise BadInput(f"{name}: unknown command; {nearest(name, (usage.split()[0] for usage in HELP))}")
    with refusing(f"/save: {value}", kinds=(RuntimeError,)):  # ~ of an unknown user
        path = Path(value).expanduser()
    if path.suffix != ".jsonl" or not conversation.turns:
        got = "no turns yet" if path.suffix == ".jsonl" else value or "no name"
        raise BadInput(f"/save: got {got}, wanted turns, and a .jsonl file to add them to as a line")
    messages = [message._asdict() for message in [*conversation.system, *conversation.turns]]
    with writing(path), closing(JsonLog(path)) as log:
        log.append({"messages": messages}, durable=True)
    saved = f"Saved {len(messages)} messages as the last line of {printable(str(path))}"
    if not conversation.cut:
        return saved
    answers = "1 answer in it was" if conversation.cut == 1 else f"{conversation.cut:,} answers in it were"
    cut = note(f"{answers} cut; a model trained on that line learns to end there, so edit or remove it")
    return f"{saved}\n{cut}"


def wrapped(parts: Iterable[str], columns: int) -> Iterator[str]:
    """Yield a text with line ends in place of spaces before words that would cross a terminal's last column."""
    line = pending = ""
    for part in chain(parts, ["\n"]):
        *words, pending = re.split(r"(?=[\s\u2e80-\U0010ffff])", pending + part)
        if len(pending) > columns:
            words, pending = [*words, pending], ""
        for word in words:
            width = sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in line + word)
            shown = "\n" + word.lstrip(" ") if line and width > columns and word[:1] != "\n" else word
            line = (line + shown).rpartition("\n")[2]
            yield shown


def _interrupt_once(*_: Any) -> None:
    """Raise KeyboardInterrupt, and ignore Ctrl-C until the next prompt: a second one would end the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
