"""Tokenizer: ranks, a splitting pattern and special tokens, which convert text to ids and ids to text.

A special token inside a text is ordinary text, so a document that contains "<|endoftext|>" cannot forge a boundary.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np

from common.errors import BadInput, refusing
from common.output import Notice, note
from tokens.tokenizer.known import GPT2
from tokens.tokenizer.ranks import library_values

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

PROBE = [
    "",
    "Hello world! It's what we'll've said; they'RE not I'm.  Two  spaces, a tab\t\tand\r\n\r\n  lines \n",
    "def f(x):\n        return {'a': [x ** 2, 0xFF, 1_000_000.5e-3]}  # 日本語のコメント\n",
    "<|endoftext|> is <|fim_prefix|> text",
    "naïve cafe\u0301 Straße ΑΒΓ абв שלום مرحبا हिन्दी ไทย 한국어 中文\uff0c\u3002 ﬁ ² ½ Ⅷ ①",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\ufe0f",
    "\x00\x01\x1c\x7f\x85\xa0\u2028\u3000\u200b\ufeff\ufffd\U0010ffff",
    # Letters from newer Unicode versions, followed by the endings of contractions in GPT-2's pattern
    "\U000323b0's \U00016ea0're \u1c89'll \ua7cb's \U00010d50've",
    "a" * 300 + "1" * 300 + " " * 300 + "\n" * 50 + "!?" * 100 + "é" * 100 + "中" * 100,
]

END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd".encode()  # text that is shown for an unknown id


class Encoder(Protocol):
    """Encodes text as ids 0 .. vocabulary_size - 1."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def end_of_text_id(self) -> int: ...

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts in one array (1-D, `token_dtype`), and the number of ids of each text (int64)."""


@attrs.frozen
class ByteCoder:
    """Encodes a text as its UTF-8 bytes, with the ids 0 .. 255."""

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The id of each byte sequence that has one. Special tokens are not included."""
        return {bytes([byte]): byte for byte in range(256)}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


@attrs.frozen
class CharacterCoder:
    """Encodes each character of a text as one of the ids 0, 1, 2, ..."""

    characters: str  # in the order of their ids

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        return {character.encode(errors="replace"): number for character, number in self._ids.items()}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters)}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D. Raises BadInput for a character without an id."""
        try:
            return np.fromiter(map(self._ids.__getitem__, text), np.uint32, len(text))
        except KeyError as error:
            raise BadInput(f"tokenizer chars: {error} is not one of its {len(self.characters):,} characters") from error


@attrs.frozen
class BytePairCoder:
    """Byte-pair encoding of each match of a pattern, computed by tiktoken."""

    encoding: "tiktoken.Encoding"
    pattern: str

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        encoding = self.encoding
        return {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D. Raises UnicodeEncodeError for lone surrogates."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())


@attrs.frozen
class LibraryCoder:
    """Byte-pair encoding by the `tokenizers` library, for tokenizers that a single splitting pattern cannot describe.

    Some published tokenizers normalize a text, or split it several times. Others have added tokens, such as Qwen 3's
    `<think>`. Such a token is not special, but it still replaces its text everywhere.
    """

    ranks: dict[bytes, int]  # ids of byte pairs, and of added tokens that are not special
    structure: str  # JSON object with the keys normalizer, pre_tokenizer and added_tokens of tokenizer.json

    @property
    def words(self) -> dict[bytes, int]:
        """The ranks of byte pairs, without added tokens."""
        added = {name.encode() for name in self.added}
        return {token: rank for token, rank in self.ranks.items() if token not in added}

    @property
    def added(self) -> frozenset[str]:
        """The added tokens, including special ones."""
        return frozenset(token["content"] for token in self.structure_values["added_tokens"])

    @cached_property
    def structure_values(self) -> dict[str, Any]:
        """The structure as parsed JSON."""
        return json.loads(self.structure)

    @cached_property
    def _library(self) -> "tokenizers.Tokenizer":
        from tokenizers import Tokenizer as LibraryTokenizer

        library = LibraryTokenizer.from_str(json.dumps(library_values(self.words, **self.structure_values)))
        library.encode_special_tokens = True  # the text of a special token is ordinary text
        return library

    def check(self) -> None:
        """Raise an Exception if the library does not accept the structure."""
        self._library  # noqa: B018

    def begins(self, text: str) -> frozenset[int]:
        """Return the positions at which the separately encoded parts of a text begin."""
        return frozenset(begin for _, (begin, _) in self._library.pre_tokenizer.pre_tokenize_str(text))

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D. Raises UnicodeEncodeError for lone surrogates."""
        text.encode()
        # `encode_batch_fast` computes no offsets.
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)


Coder = ByteCoder | CharacterCoder | BytePairCoder | LibraryCoder


@attrs.frozen(kw_only=True)
class Tokenizer:
    """A reversible encoder. Special tokens inside a text are ordinary text."""

    name: str
    coder: Coder
    special_tokens: dict[str, int]  # spelling -> id: the end of text, and the markers of turns
    end_of_text: str = END_OF_TEXT
    # Whether the ranks are written to a file next to the tokens. False if the name or the characters define all ids.
    has_ranks_file: bool = True
    # Special tokens that the tokenizer.json puts before or after each text. Lockstep does not add them.
    surrounding_tokens: tuple[str, ...] = ()

    @cached_property
    def vocabulary_size(self) -> int:
        return 1 + max(*self.coder.ranks.values(), *self.special_tokens.values())

    @property
    def end_of_text_id(self) -> int:
        return self.special_tokens[self.end_of_text]

    @property
    def pattern(self) -> str | None:
        """The splitting pattern of a `BytePairCoder`, or None for any other coder."""
        return self.coder.pattern if isinstance(self.coder, BytePairCoder) else None

    @property
    def structure(self) -> str | None:
        """How the `tokenizers` library prepares a text for byte pairs, if a splitting pattern cannot describe it."""
        return self.coder.structure if isinstance(self.coder, LibraryCoder) else None

    @property
    def surrounding_note(self) -> Notice | None:
        """A note for the user about `surrounding_tokens`, or None if there are none."""
        if not self.surrounding_tokens:
            return None
        names = " and ".join(self.surrounding_tokens)
        return note(
            f"tokenizer {self.name}: its tokenizer.json also puts {names} around each text; Lockstep does not add "
            f"them, and ends each document with {self.end_of_text}"
        )

    @property
    def characters(self) -> str | None:
        """The characters of a character tokenizer, in the order of their ids."""
        return self.coder.characters if isinstance(self.coder, CharacterCoder) else None

    def with_special_tokens(self, names: Iterable[str]) -> "Tokenizer":
        """Return a tokenizer that also has these special tokens. New names get the ids after the existing ids.

        Raises BadInput for a name that is an added token of a tokenizer.json but not a special one. A text that
        contains the name would get that token's id, and the model would learn a second id for the same turn.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self.special_tokens]
        added = self.coder.added if isinstance(self.coder, LibraryCoder) else frozenset[str]()
        if ordinary := [name for name in missing if name in added]:
            raise BadInput(
                f"tokenizer {self.name}: {ordinary[0]} is an added token, id {self.coder.ranks[ordinary[0].encode()]}, "
                'but not a special one; set "special": true for it in tokenizer.json, because only the template may '
                "insert it"
            )
        new_tokens = {name: self.vocabulary_size + number for number, name in enumerate(missing)}
        return attrs.evolve(self, special_tokens={**self.special_tokens, **new_tokens})

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D, in `token_dtype`. Raises BadInput for a text that cannot be encoded."""
        with refusing(f"tokenizer {self.name}: cannot encode the text"):  # for example a million spaces
            try:
                ids = self.coder.encode(text)
            except UnicodeEncodeError:  # a lone surrogate
                ids = self.coder.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return ids.astype(token_dtype(self.vocabulary_size), copy=False)

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts as `Encoder` does. Byte-pair coders raise UnicodeEncodeError for lone surrogates."""
        parts = [self.coder.encode(text) for text in texts]
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.concatenate(parts).astype(token_dtype(self.vocabulary_size), copy=False), lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. Special tokens are spelled out. Invalid UTF-8 and unknown ids become U+FFFD."""
        return b"".join(map(self.spell, ids)).decode("utf-8", errors="replace")

    def spell(self, token: int) -> bytes:
        """Return the bytes of an id, the spelling of a special token, or U+FFFD for an unknown id."""
        return self.spelled.get(token, REPLACEMENT)

    @cached_property
    def spelled(self) -> dict[int, bytes]:
        """The bytes of every id; for a special token, its spelling."""
        special = {number: name.encode(errors="replace") for name, number in self.special_tokens.items()}
        return {number: token for token, number in self.coder.ranks.items()} | special


def byte_pair_tokenizer(name: str, ranks: dict[bytes, int], pattern: str = GPT2) -> Tokenizer:
    """Return a tokenizer built from ranks and a splitting pattern. The end of text gets the id after the highest rank.

    Raises BadInput like `byte_pair_coder`.
    """
    special_tokens = {END_OF_TEXT: 1 + max(ranks.values(), default=0)}
    return Tokenizer(name=name, coder=byte_pair_coder(name, ranks, pattern), special_tokens=special_tokens)


def byte_pair_coder(name: str, ranks: dict[bytes, int], pattern: str) -> BytePairCoder:
    """Return a coder built from ranks and a splitting pattern.

    Raises BadInput for an invalid pattern, and for a byte without a rank, because tiktoken would panic.
    """
    import tiktoken

    check_all_bytes(name, ranks)
    with refusing(f"tokenizer {name}: pattern"):
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return BytePairCoder(encoding, pattern)


def check_all_bytes(name: str, ranks: dict[bytes, int]) -> None:
    """Raise BadInput unless every byte has its own rank."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise BadInput(f"tokenizer {name}: byte {missing[0]:#04x} has no rank; every byte needs one")


def fingerprint(encoder: Encoder) -> str:
    """Return a sha256 of the ids that an encoder gives to the texts in PROBE, which were chosen to tell encoders apart.

    The only special token that affects the hash is the end of text. Names and versions of encoders are not sufficient,
    because tiktoken's ids may change when its regex library gets new Unicode tables.
    """
    if isinstance(encoder, Tokenizer) and encoder.characters is not None:
        return hashlib.sha256(encoder.characters.encode(errors="replace")).hexdigest()
    ids, lengths = encoder.encode_batch(PROBE)
    end = encoder.end_of_text_id
    values = [end + 1, end, *lengths.tolist(), *ids.tolist()]
    return hashlib.sha256(" ".join(str(value) for value in values).encode()).hexdigest()


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return uint16 if every id fits, and uint32 otherwise."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)
