"""Coders: ordinary text to ids, by bytes, by characters, or by byte pairs within the matches of a pattern."""

from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np

from common.errors import BadInput, refusing

if TYPE_CHECKING:
    import tiktoken


@attrs.frozen
class ByteCoder:
    """UTF-8 bytes as ids 0..255."""

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The id of every byte sequence that has one."""
        return {bytes([byte]): byte for byte in range(256)}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


@attrs.frozen
class CharacterCoder:
    """The characters of a text as ids 0, 1, 2, ..."""

    characters: str  # in the order of their ids

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        return {character.encode(errors="replace"): number for character, number in self._ids.items()}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters)}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, 1-D. Raises BadInput for a character that has none."""
        try:
            return np.fromiter(map(self._ids.__getitem__, text), np.uint32, len(text))
        except KeyError as error:
            raise BadInput(f"tokenizer chars: {error} is none of its {len(self.characters):,} characters") from error


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


Coder = ByteCoder | CharacterCoder | BytePairCoder


def byte_pair_coder(name: str, ranks: dict[bytes, int], pattern: str) -> BytePairCoder:
    """Return the coder of ranks. Raises BadInput for a pattern that tiktoken refuses, and for a byte without rank.

    At a text with such a byte tiktoken would end the process.
    """
    import tiktoken

    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise BadInput(f"tokenizer {name}: byte {missing[0]:#04x} has no rank of its own, wanted one of each byte")
    with refusing(f"tokenizer {name}: pattern"):
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return BytePairCoder(encoding, pattern)
