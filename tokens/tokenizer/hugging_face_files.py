"""Hugging Face tokenizer files: write a tokenizer as tokenizer.json, vocab.json and merges.txt, and read them.

A tokenizer.json can be read if it is byte-level BPE. The ids are the same as those of the `tokenizers` library, if the
library treats special tokens in a text as ordinary text and adds no tokens to the text. A key that would change these
ids in a way that is not implemented is refused, and the error names the key.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadInput, refusing
from common.files import replace_file
from common.json_files import parse_json, read_regular
from common.output import note, show
from common.text import quoted
from tokens.tokenizer.known import GPT2, PATTERNS, recognized
from tokens.tokenizer.ranks import BYTE_LEVEL, library_values, merges, printable_letters, read_ranks
from tokens.tokenizer.tokenizer import (
    END_OF_TEXT,
    Coder,
    LibraryCoder,
    Tokenizer,
    byte_pair_coder,
    byte_pair_tokenizer,
    check_all_bytes,
)

if TYPE_CHECKING:
    from tokens.tokenizer.template import Template

TOKENIZER, SETTINGS, VOCABULARY, MERGES = "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
RANKS_FILES = ("tokenizer.model", "tokenizer.tiktoken")  # other programs read these instead of tokenizer.json
CHAT_TEMPLATE = "chat_template.jinja"
# Usual spellings of the end of a text. They are tried if tokenizer_config.json names no eos_token.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
ADDED_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")  # options of an added token
# Supported keys, each with its supported values. () allows every value; a dict describes an object, or each object of
# a list. A ByteLevel with these keys adds no tokens and splits nothing: its options only change offsets, or a space
# in decoded text.
KNOWN_BYTE_LEVEL = {"type": ("ByteLevel",), **dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), ())}
KNOWN: dict[str, Any] = {  # for tokenizer.json
    **dict.fromkeys(("version", "pre_tokenizer", "post_processor", "normalizer"), ()),
    **dict.fromkeys(("truncation", "padding"), (None,)),
    "decoder": KNOWN_BYTE_LEVEL,
    "added_tokens": {
        **dict.fromkeys(("id", "content", "normalized"), ()),
        "special": (True, False),
        **dict.fromkeys(("single_word", "lstrip", "rstrip"), (False,)),
    },
    "model": {
        "type": ("BPE",),
        "dropout": (None,),
        **dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix"), (None, "")),
        **dict.fromkeys(("fuse_unk", "byte_fallback"), (False,)),
        "ignore_merges": (False, True),
        **dict.fromkeys(("vocab", "merges"), ()),
    },
}
KNOWN_TEMPLATE = {  # a post-processor that may put special tokens around a text
    "type": ("TemplateProcessing",),
    "single": (),
    "pair": (),  # used only for pairs of texts, which Lockstep never encodes
    "special_tokens": (),
}
KNOWN_SPLIT = {
    "type": ("Split",),
    "pattern": (),
    "behavior": ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"),  # "Removed" would lose text
    "invert": (False, True),
}
NFC = {"type": "NFC"}  # the only normalizer that is supported; it joins letters and their accents
# Each of these classes also has a version that uses tokenizer.json. The name of that version ends in Fast.
CLASSES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
KNOWN_SETTINGS: dict[str, tuple[Any, ...]] = {  # for tokenizer_config.json; its other keys do not change ids
    "tokenizer_class": (
        *(class_name for name in CLASSES for class_name in (name, f"{name}Fast")),
        *("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None),
    ),
    **dict.fromkeys(("add_prefix_space", "split_special_tokens"), (False, None)),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), (False, None, True)),  # see `surrounding_tokens`
}


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """Return the text of tokenizer.json.

    Raises BadInput for a character tokenizer that has multi-byte characters, because merges cannot form them.
    """
    ranks = tokenizer.coder.ranks
    if tokenizer.characters is not None and any(len(token) > 1 for token in ranks):
        raise BadInput(
            f"tokenizer {tokenizer.name}: cannot be exported, because no sequence of merges forms its characters"
        )
    added = {
        number: {"id": number, "content": name, "special": True, **dict.fromkeys(ADDED_OPTIONS, False)}
        for name, number in tokenizer.special_tokens.items()
    }
    normalizer, pre_tokenizer = None, _splitting(tokenizer.pattern)
    if isinstance(tokenizer.coder, LibraryCoder):
        structure = tokenizer.coder.structure_values
        normalizer, pre_tokenizer, ranks = structure["normalizer"], structure["pre_tokenizer"], tokenizer.coder.words
        added |= {token["id"]: token for token in structure["added_tokens"]}
    values = library_values(ranks, [added[number] for number in sorted(added)], pre_tokenizer, normalizer)
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


def _splitting(pattern: str | None) -> dict[str, Any]:
    """Return the pre-tokenizer of a splitting pattern. GPT-2's pattern is part of ByteLevel."""
    if pattern in (None, GPT2):
        return BYTE_LEVEL
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


def write_tokenizer_files(
    tokenizer: Tokenizer, directory: Path, context_length: int, template: "Template | None" = None
) -> None:
    """Write the files that AutoTokenizer reads and, for GPT-2's pattern, the files that older loaders read.

    Raises BadInput like `tokenizer_text`.
    """
    text = tokenizer_text(tokenizer)
    model = json.loads(text)["model"]
    # GPT2Tokenizer and vocab.json support only GPT-2's pattern, and only tokens that are the result of merges.
    is_like_gpt2 = tokenizer.pattern in (None, GPT2) and "ignore_merges" not in model
    settings: dict[str, Any] = {
        "tokenizer_class": "GPT2Tokenizer" if is_like_gpt2 else "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(["bos_token", "eos_token", "unk_token"], tokenizer.end_of_text),
    }
    files = {}
    if template is not None:  # the template goes to two files: some loaders read one, and some read the other
        settings |= {**template.variables, "chat_template": template.text}
        files[CHAT_TEMPLATE] = template.text
    files |= {TOKENIZER: text, SETTINGS: json.dumps(settings, indent=2) + "\n"}
    if is_like_gpt2:
        vocabulary = {**model["vocab"], **tokenizer.special_tokens}
        files[VOCABULARY] = json.dumps(vocabulary, ensure_ascii=False) + "\n"
        files[MERGES] = "\n".join(["#version: 0.2", *model["merges"]]) + "\n"
    for name, content in files.items():
        replace_file(directory / name, content)


def read_tokenizer_files(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face model directory, or None if there is no tokenizer.

    Raises BadInput if a file is damaged or not supported.
    """
    path = directory / TOKENIZER
    if path.is_file():
        tokenizer = read_tokenizer_json(path)
        _check_second_files(directory, tokenizer)
        return tokenizer
    path = directory / VOCABULARY
    if not path.is_file():
        return None
    with _refusing_damage(path):
        vocabulary = parse_json(read_regular(path))
        end = vocabulary.pop(END_OF_TEXT, None)
        tokenizer = byte_pair_tokenizer(directory.name, ranks_of(vocabulary))
        # vocab.json does not name a splitting pattern, so only GPT-2's vocabulary can be read from it.
        if recognized(tokenizer.coder.ranks) != "gpt2" or end != tokenizer.end_of_text_id:
            raise _unsupported(
                path, f"got {tokenizer.vocabulary_size:,} ids of an unknown tokenizer, and no {TOKENIZER}"
            )
        end_of_text = {"id": end, "content": END_OF_TEXT, "special": True, **dict.fromkeys(ADDED_OPTIONS, False)}
        _check_settings(directory, [end_of_text])
    return tokenizer


def _check_second_files(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise BadInput if another file in a model directory describes a different tokenizer than tokenizer.json does."""
    advice = f"delete {TOKENIZER} or this file, whichever is wrong"
    path, ranks, letters = directory / VOCABULARY, tokenizer.coder.ranks, printable_letters()
    if path.is_file():
        with _refusing_damage(path):
            ids = parse_json(read_regular(path))
        byte_pair_ids = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
        multi_byte_ids = {token.decode(errors="replace"): rank for token, rank in ranks.items() if len(token) > 1}
        for word, number in ids.items():
            expected_id = byte_pair_ids.get(word, tokenizer.special_tokens.get(word, multi_byte_ids.get(word)))
            if expected_id != number:
                raise BadInput(f"{path}: {quoted(word)}: got id {quoted(number)}, wanted {expected_id}; {advice}")
    words = tokenizer.coder.words if isinstance(tokenizer.coder, LibraryCoder) else ranks
    for path in (directory / name for name in RANKS_FILES):
        if path.is_file():
            try:
                file_ranks = read_ranks(path)
            except BadInput:  # for example a SentencePiece model
                show(note(f"{path}: is not read; {TOKENIZER} defines the tokenizer"))
                continue
            if file_ranks != words:
                raise BadInput(f"{path}: its ranks differ from those of {TOKENIZER}; {advice}")


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Return the tokenizer that a tokenizer.json and the settings next to it describe.

    Raises BadInput for a key that would change ids in a way that is not implemented.
    """
    with _refusing_damage(path):
        values = parse_json(read_regular(path))
        model = values["model"]
        vocabulary, added = model["vocab"], _added_tokens(path, values)
        _check_known(path, "", values, KNOWN)
        special = {token["content"]: token["id"] for token in added if token["special"]}
        ordinary = {token["content"]: token["id"] for token in added if not token["special"]}
        words = {word: number for word, number in vocabulary.items() if word not in special | ordinary}
        ranks = ranks_of(words)
        ids = [*ranks.values(), *special.values(), *ordinary.values()]
        repeated_bytes = ranks.keys() & {content.encode() for content in ordinary}
        if len(set(ids)) < len(ids) or len(special) + len(ordinary) < len(added) or repeated_bytes:
            raise _unsupported(path, "added_tokens: got the same id or content twice")
        if any(type(number) is not int for number in ids):
            raise _unsupported(path, "added_tokens: got an id that is not an integer")
        _check_merges(path, model, ranks)
        name = (path.parent.name if path.name == TOKENIZER else path.stem) or path.stem
        ordinary_ranks = {content.encode(): number for content, number in ordinary.items()}
        coder = _coder(path, name, values, ranks | ordinary_ranks, added)
        surrounding = [*_surrounding_tokens(path, values), *_check_settings(path.parent, added, values["normalizer"])]
        return Tokenizer(
            name=name,
            coder=coder,
            special_tokens=special,
            end_of_text=_end_of_text(path, special),
            surrounding_tokens=tuple(dict.fromkeys(surrounding)),
        )


def _added_tokens(path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens, sorted by id, with all their keys. Raises BadInput if there are none."""
    added = values.get("added_tokens") or []
    if not added:
        raise _unsupported(path, "added_tokens: got none")
    options = {"special": True, **dict.fromkeys(ADDED_OPTIONS, False)}
    return sorted(({**options, **token} for token in added), key=lambda token: token["id"])


def _coder(
    path: Path, name: str, values: dict[str, Any], ranks: dict[bytes, int], added: list[dict[str, Any]]
) -> Coder:
    """Return the coder of a tokenizer.json. It is tiktoken's if a splitting pattern is enough, else the library's.

    `added` is the list of added tokens with all their keys, as `_added_tokens` returns it.
    """
    normalizer, pattern = _normalizer(path, values), _pattern(path, values["pre_tokenizer"])
    if normalizer is None and pattern is not None and all(token["special"] for token in added):
        return byte_pair_coder(name, ranks, pattern)
    check_all_bytes(name, ranks)
    structure = {"normalizer": normalizer, "pre_tokenizer": values["pre_tokenizer"], "added_tokens": added}
    return LibraryCoder(ranks, json.dumps(structure, ensure_ascii=False))


def ranks_of(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Return the ranks of a vocabulary whose words are spelled in printable characters.

    Raises ValueError if a character stands for no byte.
    """
    letters = printable_letters()
    byte_by_letter = {chr(byte).translate(letters): byte for byte in range(256)}
    if unknown_letters := [letter for letter in sorted({*"".join(vocabulary)}) if letter not in byte_by_letter]:
        raise ValueError(f"model: vocab: character {unknown_letters[0]!r} stands for no byte")
    return {bytes(byte_by_letter[letter] for letter in word): rank for word, rank in vocabulary.items()}


def _normalizer(path: Path, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the normalizer, or None if there is none. Raises BadInput for any normalizer except NFC."""
    steps = _steps(values["normalizer"], "normalizers")
    for step in steps:
        if step != NFC:
            raise _unsupported(path, f"normalizer: got {quoted(step)}")
    return NFC if steps else None


def _pattern(path: Path, splitting: dict[str, Any] | None) -> str | None:
    """Return the splitting pattern of a pre-tokenizer, or None if only the library can split this way.

    ByteLevel alone and ByteLevel after any number of Splits are supported. Raises BadInput for anything else.
    """
    steps = _steps(splitting, "pretokenizers")
    kinds = [step["type"] for step in steps]
    if not kinds or kinds != ["Split"] * (len(kinds) - 1) + ["ByteLevel"]:
        raise _unsupported(path, f"pre_tokenizer: got {quoted(kinds)}")
    *splits, last = steps
    byte_level = {"use_regex": True, **last}  # True is the library's default
    supported = {**KNOWN_BYTE_LEVEL, "add_prefix_space": (False,), "use_regex": (False, True) if splits else (True,)}
    _check_known(path, "pre_tokenizer: ByteLevel: ", byte_level, supported)
    for split in splits:
        _check_known(path, "pre_tokenizer: Split: ", {**dict.fromkeys(KNOWN_SPLIT), **split}, KNOWN_SPLIT)
    if not splits:
        return GPT2
    pattern = splits[0]["pattern"].get("Regex")
    is_plain = splits[0]["behavior"] == "Isolated" and not splits[0]["invert"] and not byte_level["use_regex"]
    return pattern if len(splits) == 1 and is_plain and pattern in PATTERNS.values() else None


def _surrounding_tokens(path: Path, values: dict[str, Any]) -> list[str]:
    """Return the special tokens that the post-processor puts around a text.

    Raises BadInput if the post-processor is not supported.
    """
    surrounding = []
    for step in _steps(values.get("post_processor"), "processors"):
        is_template = step.get("type") in KNOWN_TEMPLATE["type"]
        _check_known(path, "post_processor: ", step, KNOWN_TEMPLATE if is_template else KNOWN_BYTE_LEVEL)
        parts = step["single"] if is_template else [{"Sequence": {}}]
        if sum("Sequence" in part for part in parts) != 1:
            raise _unsupported(path, f"post_processor: single: got {quoted(parts)}")
        surrounding += [part["SpecialToken"]["id"] for part in parts if "Sequence" not in part]
    return surrounding


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return a list of steps: the value of `key` if `step` is a sequence, or else the single step."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _check_merges(path: Path, model: dict[str, Any], ranks: dict[bytes, int]) -> None:
    """Raise BadInput unless the merges give the same ids as the ranks. Merges that never apply are allowed, too."""
    required_merges, unreached = merges(ranks)
    letters, words = printable_letters(), model["vocab"]
    pairs = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    merged_ids = [words.get("".join(pair), -1) for pair in pairs]
    required_pairs = {tuple(part.decode("latin-1").translate(letters) for part in pair) for pair in required_merges}
    if -1 in merged_ids or merged_ids != sorted(merged_ids) or not required_pairs <= {*pairs}:
        raise _unsupported(path, "model: merges: got different merges than the ids require, or in a different order")
    if unreached and not model.get("ignore_merges"):
        raise _unsupported(path, f"model: ignore_merges: got false, but merges cannot form {unreached[0]!r}")


def _end_of_text(path: Path, special: dict[str, int]) -> str:
    """Return the special token that ends a text: the one in the settings, or a usual one.

    Raises BadInput if there is none.
    """
    settings = path.with_name(SETTINGS)
    eos_token = parse_json(read_regular(settings)).get("eos_token") if settings.is_file() else None
    name = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    if name is not None and name not in special:
        raise _unsupported(settings, f"eos_token: got {quoted(name)}, which is not an added token")
    ends = [name] if name is not None else [end for end in ENDS if end in special]
    if not ends:
        raise _unsupported(
            path, f"added_tokens: got none of {', '.join(ENDS)}, and no eos_token in {SETTINGS} next to it"
        )
    return str(ends[0])


def _check_settings(
    directory: Path, added: list[dict[str, Any]], normalizer: dict[str, Any] | None = None
) -> list[str]:
    """Check that tokenizer_config.json and similar files do not contradict tokenizer.json.

    `added` is the list of added tokens of tokenizer.json, with all their keys. Returns the tokens that the settings put
    around each text. Raises BadInput for a contradiction.
    """
    tokens, surrounding = {token["content"]: token for token in added}, []
    for path in (directory / name for name in (SETTINGS, SPECIAL, ADDED)):
        values = parse_json(read_regular(path)) if path.is_file() else {}
        if path.name == ADDED:
            values = {"added_tokens_decoder": {str(number): {"content": text} for text, number in values.items()}}
        _check_known(path, "", {key: values[key] for key in KNOWN_SETTINGS if key in values}, KNOWN_SETTINGS)
        special = {key: value for key, value in values.items() if key.endswith("_token") and type(value) is not bool}
        for number, value in enumerate(values.get("additional_special_tokens") or []):
            special[f"additional_special_tokens: {number}"] = value
        for key, value in special.items():
            content = value.get("content") if isinstance(value, dict) else value
            if content is not None and not tokens.get(content, {"special": False})["special"]:
                raise _unsupported(path, f"{key}: got {quoted(content)}")
            if content is not None and values.get(f"add_{key}") is True:
                surrounding.append(content)
        for number, token in (values.get("added_tokens_decoder") or {}).items():
            added_token = tokens.get(token["content"], {"id": None})
            if str(added_token["id"]) != number:
                raise _unsupported(path, f"added_tokens_decoder: {quoted(number)}: got {quoted(token['content'])}")
            for option in ("special", *ADDED_OPTIONS):
                changes_ids = option != "normalized" or normalizer is not None
                if changes_ids and token.get(option, added_token[option]) != added_token[option]:
                    raise _unsupported(path, f"added_tokens_decoder: {number}: {option}: got {quoted(token[option])}")
    return surrounding


def _check_known(path: Path, where: str, values: dict[str, Any], supported: dict[str, Any]) -> None:
    """Raise BadInput for a key or value that changes the ids in a way that is not implemented."""
    for key, value in values.items():
        if key not in supported:
            raise _unsupported(path, f"{where}{quoted(key)}: got {quoted(value)}")
        if isinstance(supported[key], dict):
            for number, part in enumerate(value if isinstance(value, list) else [value]):
                name = f"{key}: {number}" if isinstance(value, list) else key
                _check_known(path, f"{where}{name}: ", part or {}, supported[key])
        elif supported[key] and not any(
            type(value) is type(allowed) and value == allowed for allowed in supported[key]
        ):
            raise _unsupported(path, f"{where}{key}: got {quoted(value)}")


def _unsupported(path: Path, got: str) -> BadInput:
    expected = "byte-level BPE as in GPT-2, cl100k, Llama 3, Qwen 3, DeepSeek or o200k"
    advice = "if the model was trained with the gpt2 or bytes tokenizer, pass that name as --tokenizer"
    return BadInput(f"{path}: {got}: not supported, wanted {expected}; {advice}")


def _refusing_damage(path: Path) -> AbstractContextManager[None]:
    kinds = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
    return refusing(f"{path}: damaged", "pass a tokenizer with --tokenizer", kinds)
