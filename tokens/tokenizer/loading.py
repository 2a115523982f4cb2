"""Loading of a tokenizer by the name on a command line, by a file, or by its entry in a manifest."""

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

RANKS_SUFFIXES = (".tiktoken", ".model")  # the second is Llama 3's
SUFFIXES = (".pkl", ".json")  # of characters, or a tokenizer.json
NANOGPT = "meta.pkl"  # beside nanoGPT's tokens
DICTS = {"PROTO", "FRAME", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP"}  # instructions of a pickle
CACHE_ADVICE = "set TIKTOKEN_CACHE_DIR to a filled cache"
CHARACTERS = "chars:"  # and its characters: the whole name of a character tokenizer


def load_tokenizer(name: str, recorded: str | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", one of KNOWN_TOKENIZERS, "chars:...", or that of a local file. Raises BadInput.

    Ranks (.tiktoken, .model) must be known by content: they name neither splitting pattern nor special tokens. Others
    are accepted, with GPT-2's pattern, where they give `recorded`, the fingerprint beside their tokens.
    """
    path = Path(name)
    if name == "bytes":
        return Tokenizer(name=name, coder=ByteCoder(), special_tokens={END_OF_TEXT: 256}, has_ranks_file=False)
    if name in KNOWN_TOKENIZERS:
        return _load_known(name)
    if name.startswith(CHARACTERS):
        return _of_characters(name.removeprefix(CHARACTERS))
    if name.endswith(SUFFIXES):
        return read_tokenizer_json(path) if _is_tokenizer_json(path) else _of_characters(read_characters(path))
    if not name.endswith(RANKS_SUFFIXES):
        by_name = [each for each, known in KNOWN_TOKENIZERS.items() if known.encoding is not None]
        wanted = ["bytes", "chars", *by_name, f"a file ({', '.join([*RANKS_SUFFIXES, *SUFFIXES])})"]
        raise BadInput(f"tokenizer '{name}' is unknown; wanted {either(wanted)}")
    ranks = read_ranks(path)
    known = KNOWN_TOKENIZERS.get(recognized(ranks, sha256(path)) or "")
    if known is not None:
        tokenizer = _of_known(path.name, known, byte_pair_coder(path.name, ranks, known.pattern))
        if recorded in (None, fingerprint(tokenizer)):
            return tokenizer
    tokenizer = byte_pair_tokenizer(path.name, ranks)
    if recorded is None or fingerprint(tokenizer) != recorded:
        raise BadInput(f"{path}: unknown ranks, wanted those of {either(KNOWN_TOKENIZERS)}; pass a tokenizer.json")
    return tokenizer


def recorded_tokenizer(record: TokenizerRecord, directory: Path) -> Tokenizer:
    """Return the tokenizer of a record, whose ranks are in a directory. Raises BadInput as `load_tokenizer`."""
    ranks = directory / RANKS_FILE
    if record.characters is not None:
        tokenizer = _of_characters(record.characters)
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
        raise BadInput(f"tokenizer {record.name}: special_tokens: none has the end-of-text id {record.end_of_text_id}")
    return attrs.evolve(tokenizer, special_tokens=record.special_tokens, end_of_text=ends[0])


def record_of(tokenizer: Tokenizer, *, ranks: bool, template: str | None = None) -> TokenizerRecord:
    """Return the record of a tokenizer. `ranks`: a file of them lies beside it; `template`: of conversations."""
    is_gpt2s, only_end = recognized(tokenizer.coder.ranks) == "gpt2", tokenizer.special_tokens.keys() == {END_OF_TEXT}
    return TokenizerRecord(
        name=tokenizer.name,
        characters=tokenizer.characters,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text_id=tokenizer.end_of_text_id,
        fingerprint=fingerprint(tokenizer),
        ranks_file=RANKS_FILE if ranks else None,
        pattern=None if is_gpt2s else tokenizer.pattern,
        structure=tokenizer.structure,
        special_tokens=None if only_end else tokenizer.special_tokens,
        template=template,
    )


def identity(tokenizer: Tokenizer) -> str:
    """Return the identity of the ids that a tokenizer gives to texts, as a record's `identity`."""
    return identity_of(fingerprint(tokenizer), tokenizer.structure)


def gives_same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Tell whether two tokenizers give the same ids to every text. Special tokens, apart from the end, take no part."""
    if identity(one) != identity(other) or one.coder.ranks != other.coder.ranks:
        return False
    if not (isinstance(one.coder, LibraryCoder) and isinstance(other.coder, LibraryCoder)):
        return one.pattern == other.pattern or None in (one.pattern, other.pattern)
    structures = [coder.structure_values for coder in (one.coder, other.coder)]
    return all(structures[0].get(key) == structures[1].get(key) for key in ("normalizer", "pre_tokenizer"))


def is_recorded(tokenizer: Tokenizer, record: TokenizerRecord, directory: Path) -> bool:
    """Tell whether a tokenizer gives to every text the ids that a record's tokenizer gives.

    The record's ranks are in a directory, and are compared if they are still there. Special tokens, apart from the end,
    take no part. A record without a fingerprint is older: its ranks alone are compared.
    """
    if record.identity not in (None, identity(tokenizer)):
        return False
    ranks = directory / RANKS_FILE
    return record.ranks_file is None or not ranks.is_file() or read_ranks(ranks) == tokenizer.coder.ranks


def read_characters(path: Path) -> str:
    """Return the characters of meta.pkl, a JSON list, object of ids, or manifest, by their ids. Raises BadInput."""
    try:
        data = read_regular(path)
        values = _pickled(data) if path.suffix == ".pkl" else parse_json(data, None)
        for key in ("tokenizer", "characters") if isinstance(values, dict) else ():
            values = values.get(key, values)
        ids = values if isinstance(values, dict) else {one: number for number, one in enumerate(values)}
        if sorted(ids.values()) != [*range(len(values))] or {*map(len, ids)} != {1}:
            raise ValueError(f"got {len(values):,} entries, wanted single characters with the ids 0, 1, 2, ... once")
        "".join(ids).encode()  # a ValueError, where there are halves of surrogate pairs
        return "".join(sorted(ids, key=ids.__getitem__))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        wanted = "nanoGPT's meta.pkl, or JSON: a list of characters, or an object of their ids"
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}; wanted {wanted}") from error


def _check_structure(name: str, coder: LibraryCoder) -> None:
    """Raise BadInput unless the `tokenizers` library takes the structure of a record."""
    try:
        coder.check()
    except Exception as error:  # the library raises Exception itself; a TypeError is ours, for another set of keys
        words = "" if isinstance(error, TypeError) else in_brackets(error)
        problem = f"the tokenizers library cannot read it{words}"
        raise BadInput(f"tokenizer {name}: structure: {problem}; prepare its tokens again") from error


def _is_tokenizer_json(path: Path) -> bool:
    """Tell by its content whether a .json file is a tokenizer.json; characters have no model."""
    with suppress(OSError, ValueError):
        return isinstance(parse_json(read_regular(path)).get("model"), dict)
    return False


def _of_characters(characters: str) -> Tokenizer:
    """Return the tokenizer of characters. nanoGPT's models lack an id for its end of text."""
    special, coder = {END_OF_TEXT: len(characters)}, CharacterCoder(characters)
    return Tokenizer(name="chars", coder=coder, special_tokens=special, has_ranks_file=False)


def _of_known(name: str, known: KnownTokenizer, coder: Coder) -> Tokenizer:
    special, end = known.special_tokens, known.end_of_text
    return Tokenizer(name=name, coder=coder, special_tokens=special, end_of_text=end, has_ranks_file=name != "gpt2")


def _load_known(name: str) -> Tokenizer:
    known = KNOWN_TOKENIZERS[name]
    if known.encoding is None:
        raise BadInput(f"tokenizer {name}: its owner's terms are to be accepted; pass its file as --tokenizer FILE")
    try:
        encoding = _tiktokens_encoding(known.encoding)
    except Exception as error:  # tiktoken's download raises requests' errors, OSError, ValueError
        problem = f"its ranks are neither cached nor downloadable ({type(error).__name__})"
        advice = f"pass a local ranks file (--tokenizer FILE.tiktoken) or {CACHE_ADVICE}"
        raise BadInput(Problem(where=f"tokenizer {name}", text=problem, advice=advice)) from error
    return _of_known(name, known, BytePairCoder(encoding, known.pattern))


def _tiktokens_encoding(name: str) -> "tiktoken.Encoding":
    """Return an encoding that tiktoken has cached, or that it downloads through our client of the web.

    tiktoken's own download has no time limit, and it sends the host the password that ~/.netrc has for it. Its function
    is replaced for this call alone, because tiktoken reads local files with the same one.
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


def _pickled(data: bytes) -> dict[Any, Any]:
    """Return the dict `stoi`, the last one, of a pickle, and execute nothing. Raises ValueError for any other."""
    values: list[Any] = []  # strings and integers, in their order: a key comes before its value
    kept: list[Any] = []
    for opcode, argument, offset in pickletools.genops(data):
        name = opcode.name.removeprefix("SHORT_").removeprefix("LONG_").rstrip("12")  # of shorter and longer numbers
        if name in ("BININT", "BINUNICODE"):
            values.append(argument)
        elif name in ("BINPUT", "MEMOIZE"):
            kept += values[-1:] or [None]
        elif name == "BINGET":
            values.append(kept[argument or 0])
        elif name not in DICTS:
            raise ValueError(f"byte {offset:,}: instruction {opcode.name} is none of a vocabulary, and not followed")
    pairs = values[values.index("stoi") + 1 :]
    return dict(zip(pairs[::2], pairs[1::2], strict=True))
