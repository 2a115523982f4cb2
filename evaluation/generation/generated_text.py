"""Generated text, in the one way that all commands share: prompt ids -> ids of new tokens -> pieces of text.

`GeneratedText` is one text, as chat, sample, smoke, instruct and the samples of a report read it. The server computes
the next tokens of several texts in one forward pass, so its engine uses the same parts directly: `Drawing` and
`advance` of model/generate.py, which choose tokens and end a text, and `TextDecoder`, which turns them into characters.
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

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # terminals obey these


class TextPiece(NamedTuple):
    text: str  # the characters that a token completes
    offset: int  # in characters: where the character that holds the token's first byte stands in the whole text


class TextDecoder:
    """Text of tokens as they come: a character is returned with the token that holds its last byte."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        """`spell`: the bytes of a token, as `Trained.spell` returns them."""
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.characters = 0  # returned so far

    def add(self, token: int) -> TextPiece:
        """Return the text that a token completes, which may be empty; broken UTF-8 becomes U+FFFD."""
        spelled = self._spell(token)
        text = self._decoder.decode(spelled[:1])
        pending, _ = self._decoder.getstate()  # bytes of a character that is not complete
        offset = self.characters + len(text)
        if spelled:  # the first two bytes of a surrogate are pending, although they can only become two characters
            offset += len(pending.decode(errors="replace")) - 1
        text += self._decoder.decode(spelled[1:])
        self.characters += len(text)
        return TextPiece(text, offset)

    def end(self) -> str:
        """Return the rest of a character that was not completed, as U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self.characters += len(text)
        return text


@attrs.define(eq=False)
class GeneratedText:
    """A text that a model generates after a prompt: iterate over it to generate it in pieces of whole characters."""

    trained: Trained
    prompt: list[int]
    count: int  # most new tokens
    sampling: Sampling
    stop: Collection[int] = attrs.field(default=(), kw_only=True)  # ids that end the text
    prefix: Prefix | None = attrs.field(default=None, kw_only=True)  # of an earlier text, whose beginning is reused
    tokens: list[int] = attrs.field(factory=list, init=False)  # generated so far, without the one that ended the text
    finish: Finish | None = attrs.field(default=None, init=False)  # why the text ended; None until then, or interrupted
    interrupted: bool = attrs.field(default=False, init=False)  # set it to end the text before its next token

    def __iter__(self) -> Iterator[str]:
        """Generate and yield the text, once. Raises BadInput for logits that are not finite."""
        assert not self.tokens, "this text is generated already"
        prefix = self.prefix or Prefix(self.trained.network)
        decoder = TextDecoder(self.trained.spell)
        with refusing(self.trained.place.path):
            for drawn in draw(prefix, self.prompt, self.count, self.sampling, self.stop):
                if self.interrupted and drawn.finish != "stop":
                    break
                self.finish = drawn.finish
                if drawn.finish != "stop":
                    self.tokens.append(drawn.token)
                    if text := decoder.add(drawn.token).text:
                        yield text
        if text := decoder.end():
            yield text


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


def print_parts(parts: Iterable[str]) -> bool:
    """Print parts of a text as they come, control characters escaped, and a line end; return False if nobody reads."""
    try:
        for text in parts:
            print(CONTROL.sub(lambda found: printable(found[0]), text), end="", flush=True)
            if isinstance(sys.stdout, GuardedStream) and sys.stdout.output.problem is not None:
                return False
    finally:
        print(flush=True)
    return True
