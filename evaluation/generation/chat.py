"""Chat with a model in a terminal, or print its answer to a single message."""

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
from evaluation.generation.prompts import forgotten_note, latest_turns, read_prompt
from evaluation.shared.load import Trained
from model.generate import Prefix, Sampling
from tokens.tokenizer.template import ASSISTANT, SYSTEM, USER, Message

HELP = {
    "/reset": "start a new conversation; the system message stays",
    "/save FILE": "append the conversation to a .jsonl file that prepare_data.py can read",
    "/help": "print this list (to send a message that begins with /, put a space before it)",
}


class Conversation:
    """The messages of a user and a model. A model without a template reads them as a single plain text.

    The attention keys and values of earlier messages are cached.
    """

    def __init__(self, trained: Trained, longest: int, system: str | None = None):
        """Begin a conversation.

        `longest`: the largest number of tokens per answer. `system`: a system message, which is never left out. Raises
        BadInput if the model does not support system messages, or if the message is too long.
        """
        self.trained, self.longest = trained, longest
        self.context = trained.network.config.context_length
        self.system = [] if system is None else [Message(SYSTEM, system)]
        self.turns: list[Message] = []  # alternating messages of the user and the model
        self.unseen = 0  # number of turns at the beginning that no longer fit in the context
        self.answers = 0  # number of answers that were started
        self.latest: GeneratedText | None = None  # the last answer that was started
        self.cut = 0  # number of answers in `turns` that the model did not end itself
        self._prefix = Prefix(trained.network)
        if self.system and trained.template is None:
            raise BadInput(
                f"{trained.location.path}: a system message needs a conversation template, but this model has none"
            )
        self._prompt(Message(USER, " "))

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer to a message, in parts that consist of complete characters. Raises BadInput.

        At the end, the message and the answer are added to the turns, even if the answer was interrupted.
        """
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
        """End the answer before its next token.

        This method is used as a signal handler, and does not interrupt a line that is being printed.
        """
        if self.latest is not None:
            self.latest.interrupted = True

    def _prompt(self, question: Message) -> list[int]:
        """Return the ids of a prompt. It has as many of the latest turns as fit, and it leaves room for the answer.

        Raises BadInput if the question alone is too long.
        """
        turns = [*self.turns[self.unseen :], question]
        left_out, ids = latest_turns(self.system, turns, self.trained.ask, self.context, self.longest)
        self.unseen += left_out
        return ids


def run(command: ChatCommand) -> None:
    """Print the answer to a single message, or to all messages that are typed until the input ends."""
    typed = command.prompt is None and os.isatty(0)
    message = "" if typed else read_prompt(command.prompt)
    conversation = Conversation(load_for_generation(command), command.tokens, command.system)
    if conversation.trained.template is None:
        show(note("the model has no conversation template, so it continues the text"))
    if not typed:
        print_parts(conversation.answer(message, sampling_of(command, 0)))
        return
    with suppress(ImportError):  # with readline, input() can edit lines
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines form a single message
    show(conversation.trained.location.title)
    show("Ctrl-C ends an answer, Ctrl-D ends the program, and /help lists the commands.")
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
    """Carry out a typed command, or print the answer to a typed message. Ctrl-C ends the answer. Raises BadInput."""
    message = typed.strip()
    if re.match(r"/\w*(\s|$)", typed):
        show(*run_chat_command(conversation, *message.split(maxsplit=1)).split("\n"))
    elif message:
        before, unseen = len(conversation.turns), conversation.unseen
        signal.signal(signal.SIGINT, conversation.interrupt)
        with closing(conversation.answer(message, sampling)) as parts:
            print_parts(wrap_words(parts, shutil.get_terminal_size().columns) if os.isatty(1) else parts)
            if conversation.latest is not None and conversation.latest.finish == "length":
                show(note(f"the answer was cut at {conversation.longest:,} tokens or at the end of the context"))
        if len(conversation.turns) == before:
            show(note("the model gave no answer; your message was dropped"))
        if conversation.unseen > unseen == 0:
            show(note(f"{forgotten_note(conversation.context)}"))


def run_chat_command(conversation: Conversation, name: str, value: str = "") -> str:
    """Carry out a command such as /save, and return the text to print. Raises BadInput."""
    if name == "/help":
        return "\n".join(f"{usage:<12}{text}" for usage, text in HELP.items())
    if name == "/reset":
        conversation.turns, conversation.unseen, conversation.cut = [], 0, 0
        return "A new conversation begins."
    if name != "/save":
        raise BadInput(f"{name}: unknown command; {nearest(name, (usage.split()[0] for usage in HELP))}")
    with refusing(f"/save: {value}", kinds=(RuntimeError,)):  # raised for ~NAME if there is no such user
        path = Path(value).expanduser()
    if path.suffix != ".jsonl" or not conversation.turns:
        if path.suffix == ".jsonl":
            raise BadInput("/save: there is nothing to save yet; send a message first")
        raise BadInput(f"/save: got {value or 'no name'}, wanted a .jsonl file, to which a line is appended")
    messages = [message._asdict() for message in [*conversation.system, *conversation.turns]]
    with writing(path), closing(JsonLog(path)) as log:
        log.append({"messages": messages}, durable=True)
    saved = f"Saved {len(messages)} messages as the last line of {printable(str(path))}"
    if not conversation.cut:
        return saved
    answers = "1 answer in it was" if conversation.cut == 1 else f"{conversation.cut:,} answers in it were"
    cut = note(f"{answers} cut; a model trained on that line would learn to end there, so edit or remove the line")
    return f"{saved}\n{cut}"


def wrap_words(parts: Iterable[str], columns: int) -> Iterator[str]:
    """Yield a text in which a newline replaces the space before each word that would not fit in the line."""
    line = pending = ""
    for part in chain(parts, ["\n"]):
        *words, pending = re.split(r"(?=[\s\u2e80-\U0010ffff])", pending + part)
        if len(pending) > columns:
            words, pending = [*words, pending], ""
        for word in words:
            width = sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in line + word)
            shown = "\n" + word.lstrip(" ") if line and width > columns and word[:1] != "\n" else word
            line = (line + shown).rpartition("\n")[2]
            yield shown


def _interrupt_once(*_: Any) -> None:
    """Raise KeyboardInterrupt, and ignore Ctrl-C until the next prompt, because a second one would end the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
