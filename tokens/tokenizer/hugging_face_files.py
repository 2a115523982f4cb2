"""Hugging Face tokenizer files: byte-pair ranks to tokenizer.json, vocab.json and merges.txt, and back.

There a token is spelled in printable characters, one for each byte, and the encoding is a list of merges. Here, as in
tiktoken, it is a rank for each byte sequence. Either follows from the other.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from common.errors import BadInput, quoted
from common.files import replace_file
from common.json_files import parse_json, read_regular
from tokens.tokenizer.ranks import is_gpt2
from tokens.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, byte_pair_tokenizer

TOKENIZER, SETTINGS, VOCABULARY, MERGES = "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
# GPT-2's pre-tokenization pattern is part of ByteLevel.
SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Known keys of tokenizer.json, each with the values that give GPT-2's ids; with (), any does.
KNOWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("version", "added_tokens", "pre_tokenizer", "post_processor", "decoder", "model"), ()),
    **dict.fromkeys(("truncation", "padding", "normalizer"), (None,)),
}
KNOWN_MODEL: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "dropout": (None,),
    **dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix"), (None, "")),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), (False,)),
    **dict.fromkeys(("vocab", "merges"), ()),
}
# One that adds no tokens and splits nothing: its other options move offsets, and a space before a decoded text.
KNOWN_BYTE_LEVEL = {"type": ("ByteLevel",), **dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), ())}
KNOWN_TEMPLATE: dict[str, tuple[Any, ...]] = {  # one that adds no tokens, as transformers writes it
    "type": ("TemplateProcessing",),
    "single": ([{"Sequence": {"id": "A", "type_id": 0}}],),
    "pair": (),  # of texts, which are never encoded
    "special_tokens": ({},),
}
KNOWN_SPLITTING = {**KNOWN_BYTE_LEVEL, "add_prefix_space": (False,), "use_regex": (True,)}
KNOWN_ADDED: dict[str, tuple[Any, ...]] = {
    "id": (),
    "content": (END_OF_TEXT,),
    "special": (True,),
    **dict.fromkeys(("single_word", "lstrip", "rstrip"), (False,)),
    "normalized": (),  # there is no normalizer
}
KNOWN_SETTINGS: dict[str, tuple[Any, ...]] = {  # of tokenizer_config.json, which has others that change no ids
    "tokenizer_class": ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", None),
    **dict.fromkeys(("add_prefix_space", "add_bos_token", "add_eos_token", "split_special_tokens"), (False, None)),
}


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the content of tokenizer.json, or None for ranks that no list of merges gives."""
    ranks, letters = tokenizer.ranks(), _letters()
    halves = _halves(ranks)
    if halves is None:
        return None
    spelled = {token: token.decode("latin-1").translate(letters) for token in ranks}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": tokenizer.end_of_text_id,
                "content": END_OF_TEXT,
                "special": True,
                **dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False),
            }
        ],
        "pre_tokenizer": SPLITTING,
        "decoder": SPLITTING,
        "model": {
            "type": "BPE",
            "vocab": {spelling: ranks[token] for token, spelling in spelled.items()},
            "merges": [f"{spelled[left]} {spelled[right]}" for left, right in halves.values()],
        },
    }


def write_tokenizer_files(tokenizer: Tokenizer, directory: Path, context_length: int) -> None:
    """Write the files of AutoTokenizer, older loaders and converters. Raises BadInput for ranks that no merges give."""
    values = tokenizer_json(tokenizer)
    if values is None:
        raise BadInput(f"tokenizer {tokenizer.name}: no sequence of merges gives its ranks; it cannot be exported")
    model = values["model"]
    whole = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None, **values}
    special = dict.fromkeys(["bos_token", "eos_token", "unk_token"], END_OF_TEXT)
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": context_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    vocabulary = {**model["vocab"], END_OF_TEXT: tokenizer.end_of_text_id}
    for name, content in (
        (TOKENIZER, json.dumps(whole, ensure_ascii=False, indent=1)),
        (SETTINGS, json.dumps(settings, indent=2)),
        (VOCABULARY, json.dumps(vocabulary, ensure_ascii=False)),
        (MERGES, "\n".join(["#version: 0.2", *model["merges"]])),
    ):
        replace_file(directory / name, content + "\n")


def read_tokenizer_files(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face model directory, or None without one.

    Raises BadInput unless its files equal GPT-2's, but for the ranks: whatever else they name would be ignored.
    """
    path = directory / TOKENIZER
    try:
        if path.is_file():
            tokenizer = _from_tokenizer_json(parse_json(read_regular(path)), path)
        elif (path := directory / VOCABULARY).is_file():
            tokenizer = _from_spelled(parse_json(read_regular(path)), path)
            if not is_gpt2(tokenizer.ranks()):  # this older layout names no splitting pattern
                raise _refused(
                    path, f"got {tokenizer.vocabulary_size:,} ids of an unknown tokenizer, without {TOKENIZER}"
                )
        else:
            return None
        for path in (directory / name for name in (SETTINGS, SPECIAL, ADDED)):
            if path.is_file():
                _check_settings(parse_json(read_regular(path)), path, tokenizer.end_of_text_id)
        return tokenizer
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: damaged: {quoted(error)}; pass a tokenizer with --tokenizer") from error


def _from_tokenizer_json(values: dict[str, Any], path: Path) -> Tokenizer:
    model, added = values["model"], values.get("added_tokens") or []
    after = values.get("post_processor") or {}
    known_after = KNOWN_TEMPLATE if after.get("type") in KNOWN_TEMPLATE["type"] else KNOWN_BYTE_LEVEL
    for where, found, known in (
        ("", values, KNOWN),
        ("model: ", model, KNOWN_MODEL),
        ("pre_tokenizer: ", values["pre_tokenizer"] or {}, KNOWN_SPLITTING),
        ("post_processor: ", after, known_after),
        ("decoder: ", values.get("decoder") or {}, KNOWN_BYTE_LEVEL),
        *((f"added_tokens: {number}: ", token, KNOWN_ADDED) for number, token in enumerate(added)),
    ):
        _check_known(path, where, found, known)
    if values["pre_tokenizer"] is None or not added:
        raise _refused(path, f"{'pre_tokenizer' if added else 'added_tokens'}: got none")
    vocabulary = model["vocab"]
    tokenizer = _from_spelled({**vocabulary, END_OF_TEXT: vocabulary.get(END_OF_TEXT, added[0]["id"])}, path)
    if added[0]["id"] != tokenizer.end_of_text_id:
        raise _refused(path, f"added_tokens: 0: id: got {quoted(added[0]['id'])}")
    written = tokenizer_json(tokenizer)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if written is None or merges != written["model"]["merges"]:
        raise _refused(path, "model: merges: got others than those of the ids, in the order of the ids")
    return tokenizer


def _check_settings(values: dict[str, Any], path: Path, end_of_text_id: int) -> None:
    """Raise BadInput where tokenizer_config.json and the like change what tokenizer.json says."""
    if path.name == ADDED:
        values = {"added_tokens_decoder": {str(number): {"content": text} for text, number in values.items()}}
    _check_known(path, "", {key: values[key] for key in KNOWN_SETTINGS if key in values}, KNOWN_SETTINGS)
    special = {key: value for key, value in values.items() if key.endswith("_token") and not isinstance(value, bool)}
    for key, value in special.items():
        content = value.get("content") if isinstance(value, dict) else value
        if content not in (None, END_OF_TEXT):
            raise _refused(path, f"{key}: got {quoted(content)}")
    for number, token in (values.get("added_tokens_decoder") or {}).items():
        if (number, token["content"]) != (str(end_of_text_id), END_OF_TEXT):
            raise _refused(path, f"added_tokens_decoder: {quoted(number)}: got {quoted(token['content'])}")


def _check_known(path: Path, where: str, values: dict[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    """Raise BadInput for a key, or a value of it, that changes the ids in a way which is not implemented."""
    for key, value in values.items():
        if key not in known:
            raise _refused(path, f"{where}{quoted(key)}: got {quoted(value)}")
        if known[key] and not any(type(value) is type(each) and value == each for each in known[key]):
            raise _refused(path, f"{where}{key}: got {quoted(value)}")


def _refused(path: Path, got: str) -> BadInput:
    return BadInput(
        f"{path}: {got}: not implemented, wanted GPT-2's byte-level BPE; if the model was trained on tokens of gpt2 or "
        "bytes, pass that with --tokenizer"
    )


def _from_spelled(vocabulary: dict[str, int], path: Path) -> Tokenizer:
    letters = _letters()
    bytes_of = {chr(byte).translate(letters): byte for byte in range(256)}
    ranks = {
        bytes(bytes_of[letter] for letter in spelling): rank
        for spelling, rank in vocabulary.items()
        if spelling != END_OF_TEXT
    }
    if sorted(ranks.values()) != list(range(len(ranks))) or vocabulary.get(END_OF_TEXT) != len(ranks):
        raise BadInput(
            f"{path}: got {len(ranks)} tokens, wanted the ids 0, 1, 2, ... once each and {END_OF_TEXT} after them; "
            "pass a tokenizer with --tokenizer"
        )
    return byte_pair_tokenizer(path.parent.name, ranks)


def _halves(ranks: dict[bytes, int]) -> dict[bytes, tuple[bytes, bytes]] | None:
    """Return the two tokens whose merge gives each longer one, in the order of ranks; None if one has no such pair."""
    halves: dict[bytes, tuple[bytes, bytes]] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        parts, rank = [token[at : at + 1] for at in range(len(token))], ranks[token]
        while len(parts) > 2:  # byte-pair encoding by the tokens before this one
            merged = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            first = merged.index(min(merged))
            if merged[first] >= rank:
                return None
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            halves[token] = parts[0], parts[1]
    return halves


def _letters() -> dict[int, str]:
    """Return the printable character that stands for each byte in GPT-2's vocabulary files.

    A byte that Latin-1 prints stands for itself; the others follow from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(0x100 + index) for index, byte in enumerate(others)}
