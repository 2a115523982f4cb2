"""Load a tokenizer by its name on a command line, from a file, or by its entry in a manifest."""

import pickletools
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from common.errors import BadInput, Problem
from common.files import sha256
from common.json_files import parse_json, read_regular
from common.text import either, in_brackets
from tokens.format.manifest import RANKS_FILE, TokenizerRecord, identity_of
from tokens.tokenizer.hugging_face_files import read_tokenizer_json
from tokens.tokenizer.known import KNOWN_TOKENIZERS, KnownTokenizer, recognized
from tokens.tokenizer.ranks import read_ranks
from tokens.tokenizer.tokenizer import (
    END_OF_TEXT,
    ByteCoder,
    BytePairCoder,
    CharacterCoder,
    Coder,
    LibraryCoder,
    Tokenizer,
    byte_pair_coder,
    byte_pair_tokenizer,
    fingerprint,
)

if TYPE_CHECKING:
    import tiktoken

RANKS_SUFFIXES = (".tiktoken", ".model")  # Llama 3's file is a .model
SUFFIXES = (".pkl", ".json")  # files of characters, or a tokenizer.json
NANOGPT = "meta.pkl"  # next to nanoGPT's tokens
DICTS = {"PROTO", "FRAME", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP"}  # pickle instructions that build dicts
CACHE_ADVICE = "set TIKTOKEN_CACHE_DIR to a folder with cached ranks"
CHARACTERS = "chars:"  # the full name of a character tokenizer is this prefix and its characters


def load_tokenizer(name: str, recorded: str | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", one of KNOWN_TOKENIZERS, "chars:...", or the tokenizer of a local file.

    Files of ranks (.tiktoken, .model) do not state their splitting pattern and special tokens, so only known ranks are
    accepted. There is one exception: unknown ranks are accepted with GPT-2's pattern if the result has the
    fingerprint `recorded`, which was stored with tokens. Raises BadInput if there is no such tokenizer.
    """
    path = Path(name)
    if name == "bytes":
        return Tokenizer(name=name, coder=ByteCoder(), special_tokens={END_OF_TEXT: 256}, has_ranks_file=False)
    if name in KNOWN_TOKENIZERS:
        return _load_known(name)
    if name.startswith(CHARACTERS):
        return _character_tokenizer(name.removeprefix(CHARACTERS))
    if name.endswith(SUFFIXES):
        return read_tokenizer_json(path) if _is_tokenizer_json(path) else _character_tokenizer(read_characters(path))
    if not name.endswith(RANKS_SUFFIXES):
        names = [known_name for known_name, published in KNOWN_TOKENIZERS.items() if published.encoding is not None]
        expected = ["bytes", "chars", *names, f"a file ({', '.join([*RANKS_SUFFIXES, *SUFFIXES])})"]
        raise BadInput(f"tokenizer '{name}' is unknown; wanted {either(expected)}")
    ranks = read_ranks(path)
    published = KNOWN_TOKENIZERS.get(recognized(ranks, sha256(path)) or "")
    if published is not None:
        tokenizer = _published_tokenizer(path.name, published, byte_pair_coder(path.name, ranks, published.pattern))
        if recorded in (None, fingerprint(tokenizer)):
            return tokenizer
    tokenizer = byte_pair_tokenizer(path.name, ranks)
    if recorded is None or fingerprint(tokenizer) != recorded:
        raise BadInput(
            f"{path}: contains unknown ranks; wanted those of {either(KNOWN_TOKENIZERS)}; pass a tokenizer.json"
        )
    return tokenizer


def recorded_tokenizer(record: TokenizerRecord, directory: Path) -> Tokenizer:
    """Return the tokenizer of a record; `directory` contains its ranks. Raises BadInput like `load_tokenizer`."""
    ranks = directory / RANKS_FILE
    if record.characters is not None:
        tokenizer = _character_tokenizer(record.characters)
    elif record.ranks_file is None:
        tokenizer = load_tokenizer(record.name)
    elif record.structure is not None:
        coder = LibraryCoder(read_ranks(ranks), record.structure)
        _check_structure(record.name, coder)
        tokenizer = Tokenizer(name=record.name, coder=coder, special_tokens={END_OF_TEXT: record.end_of_text_id})
    elif record.pattern is None:
        tokenizer = load_tokenizer(str(ranks), record.fingerprint)
    else:
        tokenizer = byte_pair_tokenizer(record.name, read_ranks(ranks), record.pattern)
    if record.special_tokens is None:
        return tokenizer
    ends = [name for name, number in record.special_tokens.items() if number == record.end_of_text_id]
    if not ends:
        raise BadInput(
            f"tokenizer {record.name}: special_tokens: no token has the end-of-text id {record.end_of_text_id}"
        )
    return attrs.evolve(tokenizer, special_tokens=record.special_tokens, end_of_text=ends[0])


def record_of(tokenizer: Tokenizer, *, ranks: bool, template: str | None = None) -> TokenizerRecord:
    """Return the record of a tokenizer.

    `ranks` says whether there is a file of ranks next to the record. `template` is the template of conversations.
    """
    has_gpt2_ranks, has_only_end = (
        recognized(tokenizer.coder.ranks) == "gpt2",
        tokenizer.special_tokens.keys() == {END_OF_TEXT},
    )
    return TokenizerRecord(
        name=tokenizer.name,
        characters=tokenizer.characters,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text_id=tokenizer.end_of_text_id,
        fingerprint=fingerprint(tokenizer),
        ranks_file=RANKS_FILE if ranks else None,
        pattern=None if has_gpt2_ranks else tokenizer.pattern,
        structure=tokenizer.structure,
        special_tokens=None if has_only_end else tokenizer.special_tokens,
        template=template,
    )


def identity(tokenizer: Tokenizer) -> str:
    """Return the identity of the ids that a tokenizer gives to texts, like the `identity` of a record."""
    return identity_of(fingerprint(tokenizer), tokenizer.structure)


def gives_same_ids(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids to every text.

    Special tokens are ignored, except the end of text.
    """
    if identity(first) != identity(second) or first.coder.ranks != second.coder.ranks:
        return False
    if not (isinstance(first.coder, LibraryCoder) and isinstance(second.coder, LibraryCoder)):
        return first.pattern == second.pattern or None in (first.pattern, second.pattern)
    structures = [coder.structure_values for coder in (first.coder, second.coder)]
    return all(structures[0].get(key) == structures[1].get(key) for key in ("normalizer", "pre_tokenizer"))


def is_recorded(tokenizer: Tokenizer, record: TokenizerRecord, directory: Path) -> bool:
    """Return whether a tokenizer gives every text the same ids as a record's tokenizer.

    The record's ranks are in `directory`, and are compared if their file still exists. Special tokens are ignored,
    except the end of text. A record without a fingerprint is from an older version, and only its ranks are compared.
    """
    if record.identity not in (None, identity(tokenizer)):
        return False
    ranks = directory / RANKS_FILE
    return record.ranks_file is None or not ranks.is_file() or read_ranks(ranks) == tokenizer.coder.ranks


def read_characters(path: Path) -> str:
    """Read meta.pkl, a JSON list, a JSON object of ids or a manifest. Return its characters in the order of their ids.

    Raises BadInput if the file contains anything else.
    """
    try:
        data = read_regular(path)
        values = _read_pickle(data) if path.suffix == ".pkl" else parse_json(data, None)
        for key in ("tokenizer", "characters") if isinstance(values, dict) else ():
            values = values.get(key, values)
        ids = values if isinstance(values, dict) else {character: number for number, character in enumerate(values)}
        if sorted(ids.values()) != [*range(len(values))] or {*map(len, ids)} != {1}:
            expected = "each of the ids 0, 1, 2, ... exactly once, and one character per id"
            raise ValueError(f"got {len(values):,} entries, wanted {expected}")
        "".join(ids).encode()  # raises ValueError for lone surrogates
        return "".join(sorted(ids, key=ids.__getitem__))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        expected = "nanoGPT's meta.pkl, or JSON that is a list of characters or an object of their ids"
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}; wanted {expected}") from error


def _check_structure(name: str, coder: LibraryCoder) -> None:
    """Raise BadInput unless the `tokenizers` library accepts the structure of a record."""
    try:
        coder.check()
    except Exception as error:  # the library raises plain Exception; a TypeError means that the keys are wrong
        message = "" if isinstance(error, TypeError) else in_brackets(error)
        problem = f"the tokenizers library cannot read it{message}"
        raise BadInput(f"tokenizer {name}: structure: {problem}; prepare its tokens again") from error


def _is_tokenizer_json(path: Path) -> bool:
    """Return whether a .json file is a tokenizer.json, which has a "model", and not a file of characters."""
    with suppress(OSError, ValueError):
        return isinstance(parse_json(read_regular(path)).get("model"), dict)
    return False


def _character_tokenizer(characters: str) -> Tokenizer:
    """Return a character tokenizer. It has an end of text, for which nanoGPT's models have no id."""
    special, coder = {END_OF_TEXT: len(characters)}, CharacterCoder(characters)
    return Tokenizer(name="chars", coder=coder, special_tokens=special, has_ranks_file=False)


def _published_tokenizer(name: str, published: KnownTokenizer, coder: Coder) -> Tokenizer:
    special, end = published.special_tokens, published.end_of_text
    return Tokenizer(name=name, coder=coder, special_tokens=special, end_of_text=end, has_ranks_file=name != "gpt2")


def _load_known(name: str) -> Tokenizer:
    published = KNOWN_TOKENIZERS[name]
    if published.encoding is None:
        raise BadInput(
            f"tokenizer {name}: its owner's terms must be accepted before a download; download its file and pass "
            "it as --tokenizer FILE"
        )
    try:
        encoding = _load_encoding(published.encoding)
    except Exception as error:  # OSError, ValueError, or an exception of the library `requests`
        problem = f"its ranks are neither cached nor downloadable ({type(error).__name__})"
        advice = f"pass a local ranks file (--tokenizer FILE.tiktoken) or {CACHE_ADVICE}"
        raise BadInput(Problem(where=f"tokenizer {name}", text=problem, advice=advice)) from error
    return _published_tokenizer(name, published, BytePairCoder(encoding, published.pattern))


def _load_encoding(name: str) -> "tiktoken.Encoding":
    """Return an encoding that tiktoken has cached, or that it downloads with our web client.

    tiktoken's own download has no time limit, and it sends the password that ~/.netrc has for the host. tiktoken's
    download function is replaced only during this call, because tiktoken reads local files with the same function.
    """
    import tiktoken
    import tiktoken.load

    from common.remote_files import read_web_file

    own_download = tiktoken.load.read_file
    tiktoken.load.read_file = read_web_file  # type: ignore[assignment]  # only the parameter's name differs
    try:
        return tiktoken.get_encoding(name)
    finally:
        tiktoken.load.read_file = own_download


def _read_pickle(data: bytes) -> dict[Any, Any]:
    """Return the dict `stoi` at the end of a pickle without executing anything. Raises ValueError for other pickles."""
    values: list[Any] = []  # strings and integers in the order of the pickle, in which a key comes before its value
    memo: list[Any] = []
    for opcode, argument, offset in pickletools.genops(data):
        # Some instructions exist in several sizes.
        name = opcode.name.removeprefix("SHORT_").removeprefix("LONG_").rstrip("12")
        if name in ("BININT", "BINUNICODE"):
            values.append(argument)
        elif name in ("BINPUT", "MEMOIZE"):
            memo += values[-1:] or [None]
        elif name == "BINGET":
            values.append(memo[argument or 0])
        elif name not in DICTS:
            problem = f"contains the instruction {opcode.name}, which a vocabulary does not need; it was not executed"
            raise ValueError(f"byte {offset:,}: {problem}")
    pairs = values[values.index("stoi") + 1 :]
    return dict(zip(pairs[::2], pairs[1::2], strict=True))
