"""Generation for a reader: a model laid out for it, prompts, and text streamed character by character."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from common.errors import BadInput, printable, refusing
from common.installation import GuardedStream
from common.json_files import FILE_BYTES, check_text
from evaluation.command_line import GenerationOptions, ModelOptions
from evaluation.shared.load import Trained, load_on_all, locate
from evaluation.shared.measuring import TIMEOUT_SECONDS
from model.generate import Sampling, lay_out_for_generation
from tokens.tokenizer.template import USER, Message
from training.parallel.process_group import meet, stop

FILE = "FILE:"  # before the path of a prompt, as in nanoGPT's sample.py
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # terminals obey these


class TooLong(BadInput):
    """A message of a user that leaves no room to an answer."""


def load_for_generation(options: ModelOptions) -> Trained:
    """Load a model to generate text on one thread: else sums, and so texts, would depend on the number of cores."""
    ranks = meet(options.device, TIMEOUT_SECONDS)
    trained = load_on_all(ranks, locate(options.model, options.checkpoint), options.tokenizer)
    stop()
    torch.set_num_threads(1)
    lay_out_for_generation(trained.network)
    return trained


def sampling_of(options: GenerationOptions, number: int) -> Sampling:
    """Return the sampling of text `number` of a command: 0, 1, 2, ..."""
    seed = options.seed + number
    return Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=seed)


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


def show(parts: Iterable[str]) -> bool:
    """Print parts of a text as they come, control characters escaped, and a line end; return False if nobody reads."""
    try:
        for text in parts:
            print(CONTROL.sub(lambda found: printable(found[0]), text), end="", flush=True)
            if isinstance(sys.stdout, GuardedStream) and sys.stdout.output.problem is not None:
                return False
    finally:
        print(flush=True)
    return True


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


def whole_characters(trained: Trained, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ids in parts as it comes. A part that ends with U+FFFD waits: a character may be incomplete."""
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = trained.decode(pending)
        if not text.endswith("\ufffd"):
            yield text
            pending = []
    yield trained.decode(pending)
