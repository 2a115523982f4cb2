"""Rendering of conversation templates. A template is a program that somebody else wrote, so it runs within limits.

Jinja's sandbox keeps a template away from files and from Python's internals, but it cannot stop a loop or a huge text.
So other people's templates are rendered in a separate process, which the operating system ends when a text takes more
than SECONDS of processor time. Memory and the size of a text have limits as well. Our own templates need no such
process. The same function, `conversation_text`, does the work in both cases.
"""

import atexit
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from common.errors import BadInput
from common.text import in_brackets

if TYPE_CHECKING:
    from jinja2 import Template as JinjaTemplate

ROOT = Path(__file__).parents[2]
PLACE = "\ue000{}\ue001"  # replaces the content of a message, and contains the number of the message
SECONDS = 2  # processor time for one text
MEMORY_BYTES = 1 << 30  # memory of the process that renders
TEMPLATE_CHARACTERS = 1 << 20  # longest template
ADDED_CHARACTERS = 1 << 20  # characters that a template may add to the contents of one conversation
REFUSAL_CHARACTERS = 300  # maximum length of a template's own message in an error
SHOWN_CHARACTERS = 60  # maximum length of an excerpt in an error about two texts that differ
WHERE = "the conversation template"
OUT_OF_MEMORY = f"{WHERE}: needs more than {MEMORY_BYTES:,} bytes of memory"


@attrs.frozen
class TemplateInput:
    """Messages, and how a template should render them."""

    template: str  # Jinja template
    values: dict[str, Any]  # values of the template's other variables
    messages: list[list[str]]  # role and content of each message
    begins_answer: bool  # whether the text ends with the beginning of an answer
    answers: list[int]  # indices in `messages` of answers whose prompt must equal the text before the answer


@attrs.frozen
class RenderedText:
    """A conversation as text."""

    text: str  # contains a PLACE instead of the content of each message
    contents: list[str]  # contents of the messages, trimmed if the template trims them


def render(conversation: TemplateInput, *, trusted: bool) -> RenderedText:
    """Return the text of a conversation. A `trusted` template is our own, and runs in this process.

    Raises BadInput like `conversation_text`, and for a template that exceeds a limit or fails.
    """
    if trusted:
        return conversation_text(conversation)
    if len(conversation.template) > TEMPLATE_CHARACTERS:
        got = f"got {len(conversation.template):,} characters"
        raise BadInput(f"{WHERE}: {got}, wanted at most {TEMPLATE_CHARACTERS:,}")
    return _process_of(os.getpid()).render(conversation)


def conversation_text(conversation: TemplateInput, seconds: float | None = None) -> RenderedText:
    """Return the text of a conversation. If it takes more than `seconds` of processor time, the process is killed.

    Raises BadInput if the text does not show each message exactly once, either unchanged or trimmed, or if the text
    before one of `answers` differs from the prompt for that answer. The prompt is the text of the messages before the
    answer, rendered with `begins_answer`. A model will be given that prompt, so it must have been trained on the same
    text.
    """
    rendered = _with_places(conversation, seconds)
    for number in conversation.answers:
        prompt_input = attrs.evolve(conversation, messages=conversation.messages[:number], begins_answer=True)
        try:
            prompt = _with_places(prompt_input, seconds)
        except BadInput as error:
            raise BadInput(f"{WHERE}: message {number + 1} is an answer, but no prompt asks for it: {error}") from error
        before = rendered.text.partition(PLACE.format(number))[0]
        if prompt.text != before:
            raise BadInput(_difference(number, before, prompt.text))
        if prompt.contents != rendered.contents[:number]:
            raise BadInput(
                f"{WHERE}: trims the messages before answer {number + 1} differently than in the prompt for it"
            )
    return rendered


class TemplateRefusal(Exception):
    """A template has called raise_exception. The message is the template's own."""


class TemplateProcess:
    """A process that renders other people's templates for this process. The first conversation starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # only one of a server's threads at a time may use the process
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def render(self, conversation: TemplateInput) -> RenderedText:
        """Return the text of a conversation. Raises BadInput like `conversation_text`, or if a limit is exceeded."""
        line = json.dumps(attrs.asdict(conversation)).encode() + b"\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # another process killed it
            answer = self._exchange(line)
            if not answer.endswith(b"\n"):
                raise BadInput(f"{WHERE}: {_why_ended(self._end())}")
        values = json.loads(answer)
        if "error" in values:
            raise BadInput(values["error"])
        return RenderedText(**values)

    def _exchange(self, line: bytes) -> bytes:
        """Send a line and return the answer, which is incomplete if the process has ended."""
        if self._process is None:
            command = [sys.executable, "-m", "tokens.tokenizer.rendering", str(SECONDS)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": path}  # PYTHONSAFEPATH may hide the current folder
            # The process has its own session, so that Ctrl-C at the terminal does not reach it. It ends when its
            # input ends.
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(line)
                self._process.stdin.flush()
            return self._process.stdout.readline()
        except BaseException:  # such as Ctrl-C; the next request must not get the answer to this one
            self._process.kill()
            self._end()
            raise

    def _end(self) -> int:
        """End the process and return its exit status, as subprocess reports it."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def main() -> None:
    """Render the conversation in each line of stdin, and write each result as a line."""
    seconds = float(sys.argv[1])
    with suppress(ValueError, OSError):  # the limit may already be lower
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        try:
            values = attrs.asdict(conversation_text(TemplateInput(**json.loads(line)), seconds))
        except BadInput as error:
            values = {"error": str(error)}
        except MemoryError:
            values = {"error": OUT_OF_MEMORY}
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


@functools.lru_cache(maxsize=1)
def _process_of(_: int) -> TemplateProcess:
    """Return the rendering process that belongs to the process with this id.

    A forked process must not use the rendering process of its parent.
    """
    return TemplateProcess()


def _with_places(conversation: TemplateInput, seconds: float | None) -> RenderedText:
    """Render a conversation twice, once with its contents and once with a PLACE for each, and compare the texts."""
    contents = [content for _, content in conversation.messages]
    places = [[role, PLACE.format(number)] for number, (role, _) in enumerate(conversation.messages)]
    text = _output(attrs.evolve(conversation, messages=places), seconds)
    filled = _output(conversation, seconds)
    parts = re.split(PLACE.format("([0-9]+)"), text)
    numbers = [int(number) for number in parts[1::2]]
    counts = Counter(numbers)
    for number, (role, _) in enumerate(conversation.messages, 1):
        if (count := counts[number - 1]) != 1:
            got = f"has message {number} ({role}) {count} times"
            raise BadInput(f"{WHERE} {got}, but each message must appear exactly once")
    position, shown_contents = len(parts[0]), [*contents]
    for number, after in zip(numbers, parts[2::2], strict=True):
        content = contents[number] if number < len(contents) else "\0"  # this PLACE is from the template itself
        variants = (content, content.lstrip(), content.rstrip(), content.strip())
        matches = [variant for variant in variants if filled.startswith(variant + after, position)]
        if not matches:
            break
        shown_contents[number] = matches[0]
        position += len(matches[0] + after)
    else:
        if position == len(filled) and filled.startswith(parts[0]):
            return RenderedText(text, shown_contents)
    raise BadInput(f"{WHERE} changes the text of messages; it may only insert them as they are, or trimmed")


def _output(conversation: TemplateInput, seconds: float | None) -> str:
    """Return a template's text for a conversation. Raises BadInput if the template fails or writes too much."""
    messages = [{"role": role, "content": content} for role, content in conversation.messages]
    longest = ADDED_CHARACTERS + sum(len(content) for _, content in conversation.messages)
    # transformers sets the same variables.
    values = {"tools": None, "documents": None, "add_generation_prompt": conversation.begins_answer}
    if seconds is not None:  # nothing handles the signal, so it ends the process even during a long computation
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        text = _compiled(conversation.template).render(messages=messages, **values | conversation.values)
    except MemoryError as error:
        raise BadInput(OUT_OF_MEMORY) from error
    except Exception as error:  # a template is a program, which can raise anything
        raise BadInput(_why_failed(error)) from error
    finally:
        if seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)
    if len(text) > longest:
        raise BadInput(f"{WHERE}: writes {len(text):,} characters, wanted at most {longest:,} for these messages")
    return text


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> "JinjaTemplate":
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(problem: str) -> None:
        raise TemplateRefusal(problem)

    # transformers uses the same settings.
    loops = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    # These produce a different text each time.
    del environment.filters["random"], environment.globals["lipsum"]
    # Some templates mark answers with these tags to make a mask. The tags do not change the text.
    answers = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
    return environment.from_string(answers.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", text))


def _why_failed(error: Exception) -> str:
    """Say why a template failed: it is not Jinja, it raised an error, or it refused the conversation."""
    if isinstance(error, TemplateRefusal):
        return f"{WHERE}: refuses these messages: {' '.join(str(error).split())[:REFUSAL_CHARACTERS]}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    where = f"{WHERE}: line {line}" if line else WHERE
    if type(error).__name__ == "TemplateSyntaxError":
        return f"{where}: is not valid Jinja; correct it{in_brackets(error)}"
    return f"{where}: fails for these messages; correct the template, or the messages{in_brackets(error)}"


def _difference(number: int, before: str, prompt: str) -> str:
    """Return the error for an answer whose prompt differs from the text before the answer in training."""
    different = (at for at, pair in enumerate(zip(before, prompt, strict=False)) if len(set(pair)) > 1)
    first_difference = next(different, min(len(before), len(prompt)))
    start = max(0, first_difference - SHOWN_CHARACTERS // 2)
    excerpts = [re.sub(PLACE.format("([0-9]+)"), _name_of_place, text[start:]) for text in (prompt, before)]
    prompt_end, conversation_end = [repr(text[-SHOWN_CHARACTERS:]) for text in excerpts]
    return (
        f"{WHERE}: message {number + 1} is an answer, and the conversation before it differs from the prompt that asks "
        f"for it: the prompt ends {prompt_end}, and the conversation ends {conversation_end}; make them the same (the "
        "prompt is what the template writes with add_generation_prompt)"
    )


def _name_of_place(place: re.Match[str]) -> str:
    return f"(message {int(place[1]) + 1})"


def _why_ended(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"one text takes more than {SECONDS} seconds of processor time"
    return f"ended the process in which it runs (status {status})"


if __name__ == "__main__":
    main()
