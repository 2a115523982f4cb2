"""Read a prompt from an option, a file or stdin, and choose the turns of a conversation that fit in the context."""

from collections.abc import Callable

from common.errors import BadInput, refusing
from common.json_files import FILE_BYTES, check_text
from tokens.tokenizer.template import USER, Message

FILE = "FILE:"  # with this prefix, --prompt is the path of a file, as in nanoGPT's sample.py


class TooLong(BadInput):
    """A message that leaves no room for an answer."""


def read_prompt(option: str | None) -> str:
    """Return the prompt that an option gives, or read it from stdin if the option is None. Raises BadInput.

    A single newline at the end of a file is removed. If stdin is a terminal, the prompt is empty.
    """
    if option is not None and not option.startswith(FILE):
        check_text(option, "--prompt")
        return option
    with refusing(f"{option or 'stdin'}: cannot be read as a prompt", kinds=(OSError, ValueError)):
        with open(option.removeprefix(FILE) if option else 0, "rb", closefd=option is not None) as file:
            content = b"" if file.isatty() else file.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise ValueError(f"got more than {FILE_BYTES:,} bytes; shorten it")
        return content.decode().removesuffix("\n")


def latest_turns(
    system: list[Message],
    turns: list[Message],
    encode: Callable[[list[Message]], list[int]],
    context: int,
    longest: int,
) -> tuple[int, list[int]]:
    """Return the number of oldest turns that must be left out, and the ids of the prompt without these turns.

    The prompt always begins with the messages of `system`, followed by a message of the user. It leaves a quarter of
    the context for the answer, or `longest` tokens if that is less. TooLong is raised if the last message of the user
    does not leave that much room, even without earlier turns.
    """
    limit = context - max(1, min(longest, context // 4))
    ids: list[int] = []
    for first in [number for number, turn in enumerate(turns) if turn.role == USER] or [0]:
        ids = encode([*system, *turns[first:]])
        if len(ids) <= limit:
            return first, ids
    subject = "message and system message" if system else "message"
    raise TooLong(
        f"{subject}: got {len(ids):,} tokens, wanted at most {limit:,}, so that an answer also fits in the context of "
        f"{context:,} tokens"
    )


def forgotten_note(context: int) -> str:
    """Return the note about turns that `latest_turns` left out."""
    return f"the model no longer sees the oldest turns, because its context has only {context:,} tokens"
