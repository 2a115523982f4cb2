"""Tokenizers: GPT-2's byte-pair encoding, plain bytes, or the characters of a text.

Special tokens inside a text are ordinary text. Only the writer of token files places the end-of-text id, so a document
that contains "<|endoftext|>" cannot forge a boundary.
"""

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.errors import BadInput
from common.json_files import read_regular
from tokens.tokenizer.character_files import SUFFIXES, read_characters

if TYPE_CHECKING:
    import tiktoken

PROBE = [
    "",
    "Hello world! It's what we'll've said; they'RE not I'm.  Two  spaces, a tab\t\tand\r\n\r\n  lines \n",
    "def f(x):\n        return {'a': [x ** 2, 0xFF, 1_000_000.5e-3]}  # 日本語のコメント\n",
    "<|endoftext|> is <|fim_prefix|> text",
    "naïve cafe\u0301 Straße ΑΒΓ абв שלום مرحبا हिन्दी ไทย 한국어 中文\uff0c\u3002 ﬁ ² ½ Ⅷ ①",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\ufe0f",
    "\x00\x01\x1c\x7f\x85\xa0\u2028\u3000\u200b\ufeff\ufffd\U0010ffff",
    # Letters of newer Unicode versions before endings of contractions in GPT-2's pattern.
    "\U000323b0's \U00016ea0're \u1c89'll \ua7cb's \U00010d50've",
    "a" * 300 + "1" * 300 + " " * 300 + "\n" * 50 + "!?" * 100 + "é" * 100 + "中" * 100,
]

END_OF_TEXT = "<|endoftext|>"
CHARACTERS = "chars:"  # and its characters: the whole name of a character tokenizer
GPT2_RANKS = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # sha256 of r50k_base.tiktoken


class Encoder(Protocol):
    """Encoding of text as ids 0 .. vocabulary_size - 1."""

    vocabulary_size: int
    end_of_text_id: int

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of the texts, 1-D, `token_dtype`, and the length of each, int64."""


def fingerprint(encoder: Encoder) -> str:
    """Return a sha256 of an encoder's ids for PROBE, texts on which encoders differ.

    Names and versions do not suffice: tiktoken's ids may change with the Unicode tables of its regex library.
    """
    if isinstance(encoder, CharacterTokenizer):
        return hashlib.sha256(encoder.characters.encode(errors="replace")).hexdigest()
    ids, lengths = encoder.encode_batch(PROBE)
    values = [encoder.vocabulary_size, encoder.end_of_text_id, *lengths.tolist(), *ids.tolist()]
    return hashlib.sha256(" ".join(str(value) for value in values).encode()).hexdigest()


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return uint16 if every id fits, else uint32."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


def load_tokenizer(name: str, recorded: str | None = None) -> "Tokenizer":
    """Return the tokenizer "bytes", "gpt2", "chars:...", or that of a local file of ranks (.tiktoken) or characters.

    A ranks file names neither its splitting pattern nor its special tokens, so it must be GPT-2's by content. Others
    were used with GPT-2's pattern once: accepted where they give `recorded`, the fingerprint beside their tokens.

    Raises BadInput for another name, a damaged file, other ranks, and "gpt2" if its ranks are neither cached nor
    downloadable.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _load_gpt2()
    if name.startswith(CHARACTERS):
        return CharacterTokenizer(name.removeprefix(CHARACTERS))
    if name.endswith(SUFFIXES):
        return CharacterTokenizer(read_characters(Path(name)))
    if not name.endswith(".tiktoken"):
        raise BadInput(f"tokenizer '{name}' is unknown; wanted gpt2, bytes or a .tiktoken, .pkl or .json file")
    path = Path(name)
    ranks = read_ranks(path)
    tokenizer = byte_pair_tokenizer(path.name, ranks, ranks_file=path)
    if not is_gpt2(ranks) and (recorded is None or fingerprint(tokenizer) != recorded):
        raise BadInput(
            f"{path}: got {len(ranks):,} ranks of an unknown tokenizer, wanted GPT-2's 50,256: the file names neither "
            "splitting pattern nor special tokens, which are known of those alone; pass gpt2 or bytes"
        )
    return tokenizer


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; 256 ends a text."""

    name = "bytes"
    vocabulary_size = 257
    end_of_text_id = 256
    ranks_file: Path | None = None  # byte-pair ranks to copy beside token files; None for a built-in tokenizer

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the text, 1-D, in `token_dtype(vocabulary_size)`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined([self.encode(text) for text in texts])

    def ranks(self) -> dict[bytes, int]:
        """Return the id of every byte sequence that has one, special tokens left out."""
        return {bytes([byte]): byte for byte in range(256)}

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids; broken UTF-8 becomes U+FFFD, the end of text becomes <|endoftext|>."""
        parts = b"".join(END_OF_TEXT.encode() if token == self.end_of_text_id else bytes([token]) for token in ids)
        return parts.decode("utf-8", errors="replace")


class CharacterTokenizer:
    """The characters of a text as ids 0, 1, 2, ...; the next id ends a text, but in nanoGPT's models, which lack it."""

    name = "chars"
    ranks_file: Path | None = None

    def __init__(self, characters: str):
        self.characters = characters
        self.end_of_text_id, self.vocabulary_size = len(characters), len(characters) + 1
        self._ids = {character: number for number, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the text, 1-D. Raises BadInput for a character that has none."""
        try:
            return np.fromiter(map(self._ids.__getitem__, text), token_dtype(self.vocabulary_size), len(text))
        except KeyError as error:
            raise BadInput(f"tokenizer chars: {error} is none of its {len(self.characters):,} characters") from error

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined([self.encode(text) for text in texts])

    def ranks(self) -> dict[bytes, int]:
        return {character.encode(errors="replace"): number for character, number in self._ids.items()}

    def decode(self, ids: list[int]) -> str:
        return "".join(END_OF_TEXT if token == self.end_of_text_id else self.characters[token] for token in ids)


class BytePairTokenizer:
    """GPT-2's byte-pair encoding, computed by tiktoken; the end-of-text id follows the last rank."""

    def __init__(self, name: str, encoding: "tiktoken.Encoding", ranks_file: Path | None):
        self.name = name
        self.ranks_file = ranks_file
        self.end_of_text_id = encoding.eot_token
        self.vocabulary_size = encoding.n_vocab
        self._dtype = token_dtype(self.vocabulary_size)
        self._encoding = encoding

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), dtype=self._dtype)

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts as `Encoder` does. Raises UnicodeEncodeError for lone surrogates."""
        ids, lengths = _joined([self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts])
        return ids.astype(self._dtype), lengths

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def ranks(self) -> dict[bytes, int]:
        return {token: self._encoding.encode_single_token(token) for token in self._encoding.token_byte_values()}


Tokenizer = ByteTokenizer | BytePairTokenizer | CharacterTokenizer  # reversible encoders


def byte_pair_tokenizer(
    name: str, ranks: dict[bytes, int], ranks_file: Path | None, pattern: str | None = None
) -> BytePairTokenizer:
    """Return the tokenizer of ranks 0, 1, 2, ... with a pre-tokenization pattern (GPT-2's).

    Raises BadInput if a byte has no rank: tiktoken would end the process at a text with that byte.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's

    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise BadInput(f"tokenizer {name}: byte {missing[0]:#04x} has no rank of its own, wanted one of each byte")
    pattern, special_tokens = pattern or r50k_pat_str, {END_OF_TEXT: len(ranks)}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)
    return BytePairTokenizer(name, encoding, ranks_file)


def is_gpt2(ranks: dict[bytes, int]) -> bool:
    """Tell by their content whether ranks are GPT-2's."""
    lines = (b"%b %d\n" % (base64.b64encode(token), ranks[token]) for token in sorted(ranks, key=ranks.__getitem__))
    return hashlib.sha256(b"".join(lines)).hexdigest() == GPT2_RANKS


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of a .tiktoken file. Raises BadInput for a damaged one."""
    try:
        data = read_regular(path)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such ranks file; wanted lines of 'BASE64 RANK' as tiktoken writes them") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}; pass another --tokenizer") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise BadInput(f"{path}: line {number}: got {line[:40]!r}, wanted 'BASE64 RANK'") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise BadInput(f"{path}: got {len(ranks)} ranks, wanted each of 0, 1, 2, ... once and at least 256")
    return ranks


def _joined(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(parts), np.array([len(part) for part in parts], np.int64)


def _load_gpt2() -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken's download raises requests' errors, OSError, ValueError
        raise BadInput(
            f"tokenizer gpt2: its ranks are neither cached nor downloadable ({type(error).__name__}); "
            "pass a local ranks file (--tokenizer FILE.tiktoken) or set TIKTOKEN_CACHE_DIR to a filled cache"
        ) from error
    return BytePairTokenizer("gpt2", encoding, ranks_file=None)
