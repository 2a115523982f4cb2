"""Training of byte-pair ranks on text, by Hugging Face's tokenizers.

The ranks are a function of the counts of the pattern's matches: of pairs that are equally frequent, that of lower ranks
is merged. So they depend neither on threads nor on the order of the text.
"""

import re
from collections.abc import Iterable, Iterator

from tokens.tokenizer.hugging_face_files import ranks_of, tokenizer_text
from tokens.tokenizer.tokenizer import byte_pair_tokenizer

PART_CHARACTERS = 50_000  # of a text: the trainer buffers 256 parts
LONG_RUN = re.compile(r"\S{1000}|\s{1000}")  # is cut: the trainer's time is quadratic in the length of a match


def train_ranks(texts: Iterable[str], count: int, pattern: str) -> dict[bytes, int]:
    """Return up to `count` ranks, those of the bytes first; fewer where no other pair occurs twice."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers

    untrained = byte_pair_tokenizer("bytes", {bytes([byte]): byte for byte in range(256)}, pattern)
    tokenizer = Tokenizer.from_str(tokenizer_text(untrained))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=count, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_cut(texts), trainer)
    return ranks_of(tokenizer.get_vocab(with_added_tokens=False))


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for at in range(0, len(text), PART_CHARACTERS):
            part, begin = text[at : at + PART_CHARACTERS], 0
            for run in LONG_RUN.finditer(part):
                yield part[begin : run.end()]
                begin = run.end()
            yield part[begin:]
