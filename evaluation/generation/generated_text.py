"""Generate text from the ids of a prompt. All commands share this code.

`GeneratedText` is a single text; chat, sample, smoke, instruct and the samples of a report use it. The server computes
the next tokens of several texts in the same forward pass, so its engine uses the same building blocks directly:
`Drawing` and `advance` of model/generate.py, which choose tokens and end a text, and `TextDecoder`, which turns tokens
into characters.
"""

import codecs
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import attrs
import torch

from common.errors import refusing
from common.output import GuardedStream
from common.text import printable
from evaluation.command_line import GenerationOptions, ModelOptions
from evaluation.shared.load import Trained, load_on_all
from evaluation.shared.measuring import TIMEOUT_SECONDS
from evaluation.shared.model_location import locate
from model.generate import Finish, Prefix, Sampling, draw, lay_out_for_generation
from training.parallel.process_group import meet, stop

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters that affect a terminal


class TextPiece(NamedTuple):
    """The text of a token."""

    text: str  # the characters that the token completes
    offset: int  # index, in the complete text, of the character that contains the token's first byte


class TextDecoder:
    """Decode tokens one by one. A character is returned with the token that contains its last byte."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        """Begin a text. `spell`: a function that returns the bytes of a token, such as `Trained.spell`."""
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.characters = 0  # number of characters returned so far

    def add(self, token: int) -> TextPiece:
        """Return the text that a token completes, which may be empty. Invalid UTF-8 becomes U+FFFD."""
        spelled = self._spell(token)
        text = self._decoder.decode(spelled[:1])
        pending, _ = self._decoder.getstate()  # bytes of an incomplete character
        offset = self.characters + len(text)
        # Usually, all pending bytes form a single character, which begins at `offset`. The exception is the first two
        # bytes of a surrogate: they are pending, too, but can only become two characters. The first byte of this token
        # then belongs to the second of these characters.
        if spelled:
            offset += len(pending.decode(errors="replace")) - 1
        text += self._decoder.decode(spelled[1:])
        self.characters += len(text)
        return TextPiece(text, offset)

    def end(self) -> str:
        """Return U+FFFD if the last character is incomplete, and otherwise ""."""
        text = self._decoder.decode(b"", final=True)
        self.characters += len(text)
        return text


@attrs.define(eq=False)
class GeneratedText:
    """A text that a model generates after a prompt.

    Iterating over this object generates the text, in pieces of complete characters.
    """

    trained: Trained
    prompt: list[int]
    count: int  # largest number of new tokens
    sampling: Sampling
    stop: Collection[int] = attrs.field(default=(), kw_only=True)  # ids that end the text
    prefix: Prefix | None = attrs.field(default=None, kw_only=True)  # an earlier text, whose cached beginning is reused
    tokens: list[int] = attrs.field(factory=list, init=False)  # new tokens so far, without the id that ended the text
    # Why the text ended; None: it has not ended, or it was interrupted
    finish: Finish | None = attrs.field(default=None, init=False)
    interrupted: bool = attrs.field(default=False, init=False)  # set this to end the text before its next token

    def __iter__(self) -> Iterator[str]:
        """Generate and yield the text. This works only once. Raises BadInput for logits that are not finite."""
        assert not self.tokens, "this text has already been generated"
        prefix = self.prefix or Prefix(self.trained.network)
        decoder = TextDecoder(self.trained.spell)
        with refusing(self.trained.location.path):
            for choice in draw(prefix, self.prompt, self.count, self.sampling, self.stop):
                if self.interrupted and choice.finish != "stop":
                    break
                self.finish = choice.finish
                if choice.finish != "stop":
                    self.tokens.append(choice.token)
                    if text := decoder.add(choice.token).text:
                        yield text
        if text := decoder.end():
            yield text


def load_for_generation(options: ModelOptions) -> Trained:
    """Load a model to generate text.

    Generation uses a single thread. Otherwise, the rounding of sums, and therefore the texts, would depend on the
    number of cores.
    """
    ranks = meet(options.device, TIMEOUT_SECONDS)
    trained = load_on_all(ranks, locate(options.model, options.checkpoint), options.tokenizer)
    stop()
    torch.set_num_threads(1)
    lay_out_for_generation(trained.network)
    return trained


def sampling_of(options: GenerationOptions, number: int) -> Sampling:
    """Return the sampling options for one of a command's texts. `number`: the index of the text, from 0."""
    seed = options.seed + number
    return Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=seed)


def print_parts(parts: Iterable[str]) -> bool:
    """Print the parts of a text as they arrive, and then a newline. Control characters are escaped.

    Return False if the program that reads the output has ended.
    """
    try:
        for text in parts:
            print(CONTROL.sub(lambda match: printable(match[0]), text), end="", flush=True)
            if isinstance(sys.stdout, GuardedStream) and sys.stdout.output.problem is not None:
                return False
    finally:
        print(flush=True)
    return True
