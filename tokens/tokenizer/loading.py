"""Loading of a tokenizer by the name on a command line, by a file, or by its entry in a manifest."""

from pathlib import Path

import attrs

from common.errors import BadInput
from tokens.format.manifest import RANKS_FILE, TokenizerRecord
from tokens.tokenizer.character_files import SUFFIXES, read_characters
from tokens.tokenizer.coders import ByteCoder, BytePairCoder, CharacterCoder, gpt2_pattern
from tokens.tokenizer.ranks import is_gpt2, read_ranks
from tokens.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, byte_pair_tokenizer, fingerprint

CHARACTERS = "chars:"  # and its characters: the whole name of a character tokenizer


def load_tokenizer(name: str, recorded: str | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", "gpt2", "chars:...", or that of a local file of ranks (.tiktoken) or characters.

    A ranks file names neither its splitting pattern nor its special tokens, so it must be GPT-2's by content. Others
    were used with GPT-2's pattern once: accepted where they give `recorded`, the fingerprint beside their tokens.

    Raises BadInput for another name, a damaged file, other ranks, and "gpt2" if its ranks are neither cached nor
    downloadable.
    """
    if name == "bytes":
        return Tokenizer(name=name, coder=ByteCoder(), special_tokens={END_OF_TEXT: 256}, has_ranks_file=False)
    if name == "gpt2":
        return _load_gpt2()
    if name.startswith(CHARACTERS):
        return _of_characters(name.removeprefix(CHARACTERS))
    if name.endswith(SUFFIXES):
        return _of_characters(read_characters(Path(name)))
    if not name.endswith(".tiktoken"):
        raise BadInput(f"tokenizer '{name}' is unknown; wanted gpt2, bytes or a .tiktoken, .pkl or .json file")
    path = Path(name)
    ranks = read_ranks(path)
    tokenizer = byte_pair_tokenizer(path.name, ranks)
    if not is_gpt2(ranks) and (recorded is None or fingerprint(tokenizer) != recorded):
        raise BadInput(
            f"{path}: got {len(ranks):,} ranks of an unknown tokenizer, wanted GPT-2's 50,256: the file names neither "
            "splitting pattern nor special tokens, which are known of those alone; pass gpt2 or bytes"
        )
    return tokenizer


def recorded_tokenizer(record: TokenizerRecord, directory: Path) -> Tokenizer:
    """Return the tokenizer of a record, whose ranks are in a directory. Raises BadInput as `load_tokenizer`."""
    ranks = directory / RANKS_FILE
    if record.characters is not None:
        tokenizer = _of_characters(record.characters)
    elif record.ranks_file is None:
        tokenizer = load_tokenizer(record.name)
    elif record.pattern is None:
        tokenizer = load_tokenizer(str(ranks), record.fingerprint)
    else:
        tokenizer = byte_pair_tokenizer(record.name, read_ranks(ranks), record.pattern)
    if record.special_tokens is None:
        return tokenizer
    ends = [name for name, number in record.special_tokens.items() if number == record.end_of_text_id]
    if not ends:
        raise BadInput(f"tokenizer {record.name}: special_tokens: none has the end-of-text id {record.end_of_text_id}")
    return attrs.evolve(tokenizer, special_tokens=record.special_tokens, end_of_text=ends[0])


def recorded_pattern(tokenizer: Tokenizer) -> str | None:
    """Return the splitting pattern that a manifest states: None for GPT-2's tokenizer, which its ranks tell."""
    return None if tokenizer.pattern == gpt2_pattern() and is_gpt2(tokenizer.ranks()) else tokenizer.pattern


def recorded_special_tokens(tokenizer: Tokenizer) -> dict[str, int] | None:
    """Return the special tokens that a manifest states: None for the usual end of text alone."""
    return None if tokenizer.special_tokens.keys() == {END_OF_TEXT} else tokenizer.special_tokens


def _of_characters(characters: str) -> Tokenizer:
    """Return the tokenizer of characters. nanoGPT's models lack an id for its end of text."""
    special, coder = {END_OF_TEXT: len(characters)}, CharacterCoder(characters)
    return Tokenizer(name="chars", coder=coder, special_tokens=special, has_ranks_file=False)


def _load_gpt2() -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken's download raises requests' errors, OSError, ValueError
        raise BadInput(
            f"tokenizer gpt2: its ranks are neither cached nor downloadable ({type(error).__name__}); "
            "pass a local ranks file (--tokenizer FILE.tiktoken) or set TIKTOKEN_CACHE_DIR to a filled cache"
        ) from error
    coder = BytePairCoder(encoding, gpt2_pattern())
    return Tokenizer(name="gpt2", coder=coder, special_tokens={END_OF_TEXT: encoding.eot_token}, has_ranks_file=False)
