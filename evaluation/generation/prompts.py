"""Prompts of a command: a text from an option, a file or stdin; the turns of a conversation that the context holds."""

from collections.abc import Callable

from common.errors import BadInput, refusing
from common.json_files import FILE_BYTES, check_text
from tokens.tokenizer.template import USER, Message

FILE = "FILE:"  # before the path of a prompt, as in nanoGPT's sample.py


class TooLong(BadInput):
    """A message of a user that leaves no room to an answer."""


def read_prompt(given: str | None) -> str:
    """Return the prompt of an option; None: of stdin, unless a terminal. One last line end is cut. Raises BadInput."""
    if given is not None and not given.startswith(FILE):
        check_text(given, "--prompt")
        return given
    with refusing(f"{given or 'stdin'}: cannot be read as a prompt", kinds=(OSError, ValueError)):
        with open(given.removeprefix(FILE) if given else 0, "rb", closefd=given is not None) as file:
            data = b"" if file.isatty() else file.read(FILE_BYTES + 1)
        if len(data) > FILE_BYTES:
            raise ValueError(f"got more than {FILE_BYTES:,} bytes")
        return data.decode().removesuffix("\n")


def latest_turns(
    system: list[Message],
    turns: list[Message],
    encode: Callable[[list[Message]], list[int]],
    context: int,
    longest: int,
) -> tuple[int, list[int]]:
    """Return how many of the oldest turns have to be left out, and the ids of the prompt that the rest makes.

    The prompt keeps the messages of `system`. It goes on with a user's turn, and leaves a quarter of the context to the
    answer, or `longest` tokens if that is less. Raises TooLong if the user's last turn alone leaves less.
    """
    limit = context - max(1, min(longest, context // 4))
    ids: list[int] = []
    for first in [number for number, turn in enumerate(turns) if turn.role == USER] or [0]:
        ids = encode([*system, *turns[first:]])
        if len(ids) <= limit:
            return first, ids
    counted = "message and system message" if system else "message"
    raise TooLong(f"{counted}: got {len(ids):,} tokens, wanted at most {limit:,} of {context:,}")


def forgotten(context: int) -> str:
    """Return the note about turns that `latest_turns` left out."""
    return f"the oldest turns are forgotten: the context has {context:,} tokens"
