"""Hugging Face tokenizer files: a tokenizer to tokenizer.json, vocab.json and merges.txt, and back.

A tokenizer.json is read if it is byte-level BPE. Its ids are those of the `tokenizers` library for a text in which
special tokens are ordinary text and to which none are added. A key that would change these ids in another way is
refused by name.
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
RANKS_FILES = ("tokenizer.model", "tokenizer.tiktoken")  # which other programs read in the place of tokenizer.json
CHAT_TEMPLATE = "chat_template.jinja"
# The end of a text, if tokenizer_config.json names no eos_token
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
ADDED_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token
# Known keys, each with the values whose ids are known: with (), any does; a dict: of an object, or of each in a list.
# ByteLevel adds no tokens and splits nothing: its other options move offsets, and a space before a decoded text.
KNOWN_BYTE_LEVEL = {"type": ("ByteLevel",), **dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), ())}
KNOWN: dict[str, Any] = {  # of tokenizer.json
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
KNOWN_TEMPLATE = {  # puts special tokens around a text, or none
    "type": ("TemplateProcessing",),
    "single": (),
    "pair": (),  # of texts, which are never encoded
    "special_tokens": (),
}
KNOWN_SPLIT = {
    "type": ("Split",),
    "pattern": (),
    "behavior": ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"),  # "Removed" would lose text
    "invert": (False, True),
}
NFC = {"type": "NFC"}  # the one normalizer that is read: it joins letters and their accents
CLASSES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")  # whose fast ones are their tokenizer.json
KNOWN_SETTINGS: dict[str, tuple[Any, ...]] = {  # of tokenizer_config.json, which has others that change no ids
    "tokenizer_class": (
        *(each for name in CLASSES for each in (name, f"{name}Fast")),
        *("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None),
    ),
    **dict.fromkeys(("add_prefix_space", "split_special_tokens"), (False, None)),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), (False, None, True)),  # surrounding tokens
}


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """Return the text of tokenizer.json. Raises BadInput for characters of several bytes, which no merges give."""
    ranks = tokenizer.coder.ranks
    if tokenizer.characters is not None and any(len(token) > 1 for token in ranks):
        raise BadInput(f"tokenizer {tokenizer.name}: no sequence of merges gives its characters; it cannot be exported")
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
    """Return the pre-tokenizer of a splitting pattern. GPT-2's is part of ByteLevel."""
    if pattern in (None, GPT2):
        return BYTE_LEVEL
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


def write_tokenizer_files(
    tokenizer: Tokenizer, directory: Path, context_length: int, template: "Template | None" = None
) -> None:
    """Write the files of AutoTokenizer; for GPT-2's pattern those of older loaders, too. Raises BadInput."""
    text = tokenizer_text(tokenizer)
    model = json.loads(text)["model"]
    # Of another pattern, and of tokens that no merges give, GPT2Tokenizer and vocab.json know nothing.
    is_gpt2s = tokenizer.pattern in (None, GPT2) and "ignore_merges" not in model
    settings: dict[str, Any] = {
        "tokenizer_class": "GPT2Tokenizer" if is_gpt2s else "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(["bos_token", "eos_token", "unk_token"], tokenizer.end_of_text),
    }
    files = {}
    if template is not None:  # twice, as loaders know one place or the other
        settings |= {**template.variables, "chat_template": template.text}
        files[CHAT_TEMPLATE] = template.text
    files |= {TOKENIZER: text, SETTINGS: json.dumps(settings, indent=2) + "\n"}
    if is_gpt2s:
        vocabulary = {**model["vocab"], **tokenizer.special_tokens}
        files[VOCABULARY] = json.dumps(vocabulary, ensure_ascii=False) + "\n"
        files[MERGES] = "\n".join(["#version: 0.2", *model["merges"]]) + "\n"
    for name, content in files.items():
        replace_file(directory / name, content)


def read_tokenizer_files(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face model directory, or None without one. Raises BadInput as below."""
    path = directory / TOKENIZER
    if path.is_file():
        tokenizer = read_tokenizer_json(path)
        _check_second_files(directory, tokenizer)
        return tokenizer
    path = directory / VOCABULARY
    if not path.is_file():
        return None
    with _undamaged(path):
        vocabulary = parse_json(read_regular(path))
        end = vocabulary.pop(END_OF_TEXT, None)
        tokenizer = byte_pair_tokenizer(directory.name, ranks_of(vocabulary))
        if recognized(tokenizer.coder.ranks) != "gpt2" or end != tokenizer.end_of_text_id:  # no pattern is named here
            raise _refused(path, f"got {tokenizer.vocabulary_size:,} ids of an unknown tokenizer, without {TOKENIZER}")
        end_of_text = {"id": end, "content": END_OF_TEXT, "special": True, **dict.fromkeys(ADDED_OPTIONS, False)}
        _check_settings(directory, [end_of_text])
    return tokenizer


def _check_second_files(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise BadInput where a second file of a model directory describes another tokenizer than tokenizer.json."""
    advice = f"delete the one that is wrong, {TOKENIZER} or this one"
    path, ranks, letters = directory / VOCABULARY, tokenizer.coder.ranks, printable_letters()
    if path.is_file():
        with _undamaged(path):
            ids = parse_json(read_regular(path))
        known = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
        added = {token.decode(errors="replace"): rank for token, rank in ranks.items() if len(token) > 1}
        for word, number in ids.items():
            ours = known.get(word, tokenizer.special_tokens.get(word, added.get(word)))
            if ours != number:
                raise BadInput(f"{path}: {quoted(word)}: got id {quoted(number)}, not {ours}; {advice}")
    words = tokenizer.coder.words if isinstance(tokenizer.coder, LibraryCoder) else ranks
    for path in (directory / name for name in RANKS_FILES):
        if path.is_file():
            try:
                others = read_ranks(path)
            except BadInput:  # SentencePiece's, for one
                show(note(f"{path}: is not read; the tokenizer is that of {TOKENIZER}"))
                continue
            if others != words:
                raise BadInput(f"{path}: has other ranks; {advice}")


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Return the tokenizer of a file and the settings beside it. Raises BadInput for keys that give other ids."""
    with _undamaged(path):
        values = parse_json(read_regular(path))
        model = values["model"]
        vocabulary, added = model["vocab"], _added_tokens(path, values)
        _check_known(path, "", values, KNOWN)
        special = {token["content"]: token["id"] for token in added if token["special"]}
        ordinary = {token["content"]: token["id"] for token in added if not token["special"]}
        words = {word: number for word, number in vocabulary.items() if word not in special | ordinary}
        ranks = ranks_of(words)
        ids = [*ranks.values(), *special.values(), *ordinary.values()]
        known_bytes = ranks.keys() & {content.encode() for content in ordinary}
        if len(set(ids)) < len(ids) or len(special) + len(ordinary) < len(added) or known_bytes:
            raise _refused(path, "added_tokens: got an id or a content twice")
        if any(type(number) is not int for number in ids):
            raise _refused(path, "added_tokens: got an id that is no integer")
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
    """Return the added tokens with all their keys, by id. Raises BadInput if there are none."""
    added = values.get("added_tokens") or []
    if not added:
        raise _refused(path, "added_tokens: got none")
    options = {"special": True, **dict.fromkeys(ADDED_OPTIONS, False)}
    return sorted(({**options, **token} for token in added), key=lambda token: token["id"])


def _coder(
    path: Path, name: str, values: dict[str, Any], ranks: dict[bytes, int], added: list[dict[str, Any]]
) -> Coder:
    """Return the coder of a tokenizer.json: by its splitting pattern, or by the library for any other structure.

    `added`: its added tokens with all their keys, as `_added_tokens` returns them.
    """
    normalizer, pattern = _normalizer(path, values), _pattern(path, values["pre_tokenizer"])
    if normalizer is None and pattern is not None and all(token["special"] for token in added):
        return byte_pair_coder(name, ranks, pattern)
    check_all_bytes(name, ranks)
    structure = {"normalizer": normalizer, "pre_tokenizer": values["pre_tokenizer"], "added_tokens": added}
    return LibraryCoder(ranks, json.dumps(structure, ensure_ascii=False))


def ranks_of(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Return the ranks of a vocabulary in printable characters. Raises ValueError for one that spells no bytes."""
    letters = printable_letters()
    bytes_of = {chr(byte).translate(letters): byte for byte in range(256)}
    if others := [letter for letter in sorted({*"".join(vocabulary)}) if letter not in bytes_of]:
        raise ValueError(f"model: vocab: character {others[0]!r} stands for no byte")
    return {bytes(bytes_of[letter] for letter in word): rank for word, rank in vocabulary.items()}


def _normalizer(path: Path, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the normalizer, None for one that changes nothing. Raises BadInput for another one than NFC."""
    steps = _steps(values["normalizer"], "normalizers")
    for step in steps:
        if step != NFC:
            raise _refused(path, f"normalizer: got {quoted(step)}")
    return NFC if steps else None


def _pattern(path: Path, splitting: dict[str, Any] | None) -> str | None:
    """Return the splitting pattern of a pre-tokenizer; None for one that only the library splits by.

    Known are ByteLevel, and any number of Splits before it. Raises BadInput for another one.
    """
    steps = _steps(splitting, "pretokenizers")
    kinds = [step["type"] for step in steps]
    if not kinds or kinds != ["Split"] * (len(kinds) - 1) + ["ByteLevel"]:
        raise _refused(path, f"pre_tokenizer: got {quoted(kinds)}")
    *splits, last = steps
    by_itself = {"use_regex": True, **last}  # the library's default
    known = {**KNOWN_BYTE_LEVEL, "add_prefix_space": (False,), "use_regex": (False, True) if splits else (True,)}
    _check_known(path, "pre_tokenizer: ByteLevel: ", by_itself, known)
    for split in splits:
        _check_known(path, "pre_tokenizer: Split: ", {**dict.fromkeys(KNOWN_SPLIT), **split}, KNOWN_SPLIT)
    if not splits:
        return GPT2
    pattern = splits[0]["pattern"].get("Regex")
    is_plain = splits[0]["behavior"] == "Isolated" and not splits[0]["invert"] and not by_itself["use_regex"]
    return pattern if len(splits) == 1 and is_plain and pattern in PATTERNS.values() else None


def _surrounding_tokens(path: Path, values: dict[str, Any]) -> list[str]:
    """Return the special tokens that a post-processor puts around a text. Raises BadInput for an unknown one."""
    found = []
    for step in _steps(values.get("post_processor"), "processors"):
        is_template = step.get("type") in KNOWN_TEMPLATE["type"]
        _check_known(path, "post_processor: ", step, KNOWN_TEMPLATE if is_template else KNOWN_BYTE_LEVEL)
        parts = step["single"] if is_template else [{"Sequence": {}}]
        if sum("Sequence" in part for part in parts) != 1:
            raise _refused(path, f"post_processor: single: got {quoted(parts)}")
        found += [part["SpecialToken"]["id"] for part in parts if "Sequence" not in part]
    return found


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, which it has under a key; of another step itself."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _check_merges(path: Path, model: dict[str, Any], ranks: dict[bytes, int]) -> None:
    """Raise BadInput unless merges encode as the ranks do. More pairs than needed never come to be side by side."""
    wanted, unreached = merges(ranks)
    letters, words = printable_letters(), model["vocab"]
    given = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    made = [words.get("".join(pair), -1) for pair in given]
    needed = {tuple(part.decode("latin-1").translate(letters) for part in pair) for pair in wanted}
    if -1 in made or made != sorted(made) or not needed <= {*given}:
        raise _refused(path, "model: merges: got others than those of the ids, in the order of the ids")
    if unreached and not model.get("ignore_merges"):
        raise _refused(path, f"model: ignore_merges: got false, but no merges give {unreached[0]!r}")


def _end_of_text(path: Path, special: dict[str, int]) -> str:
    """Return the special token that ends a text: that of the settings, or a usual one. Raises BadInput without."""
    settings = path.with_name(SETTINGS)
    named = parse_json(read_regular(settings)).get("eos_token") if settings.is_file() else None
    name = named.get("content") if isinstance(named, dict) else named
    if name is not None and name not in special:
        raise _refused(settings, f"eos_token: got {quoted(name)}, which is no added token")
    ends = [name] if name is not None else [end for end in ENDS if end in special]
    if not ends:
        raise _refused(path, f"added_tokens: got none of {', '.join(ENDS)}, and no eos_token in {SETTINGS} beside it")
    return str(ends[0])


def _check_settings(
    directory: Path, added: list[dict[str, Any]], normalizer: dict[str, Any] | None = None
) -> list[str]:
    """Raise BadInput where tokenizer_config.json and the like change what tokenizer.json says.

    `added`: the added tokens of tokenizer.json, with all their keys. Returns the tokens that the settings put around
    each text.
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
                raise _refused(path, f"{key}: got {quoted(content)}")
            if content is not None and values.get(f"add_{key}") is True:
                surrounding.append(content)
        for number, token in (values.get("added_tokens_decoder") or {}).items():
            same = tokens.get(token["content"], {"id": None})
            if str(same["id"]) != number:
                raise _refused(path, f"added_tokens_decoder: {quoted(number)}: got {quoted(token['content'])}")
            for option in ("special", *ADDED_OPTIONS):
                changes_ids = option != "normalized" or normalizer is not None
                if changes_ids and token.get(option, same[option]) != same[option]:
                    raise _refused(path, f"added_tokens_decoder: {number}: {option}: got {quoted(token[option])}")
    return surrounding


def _check_known(path: Path, where: str, values: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise BadInput for a key, or a value of it, that changes the ids in a way which is not implemented."""
    for key, value in values.items():
        if key not in known:
            raise _refused(path, f"{where}{quoted(key)}: got {quoted(value)}")
        if isinstance(known[key], dict):
            for number, part in enumerate(value if isinstance(value, list) else [value]):
                name = f"{key}: {number}" if isinstance(value, list) else key
                _check_known(path, f"{where}{name}: ", part or {}, known[key])
        elif known[key] and not any(type(value) is type(each) and value == each for each in known[key]):
            raise _refused(path, f"{where}{key}: got {quoted(value)}")


def _refused(path: Path, got: str) -> BadInput:
    wanted = "byte-level BPE as of GPT-2, cl100k, Llama 3, Qwen 3, DeepSeek or o200k"
    advice = "if the model was trained on tokens of gpt2 or bytes, pass that with --tokenizer"
    return BadInput(f"{path}: {got}: not implemented, wanted {wanted}; {advice}")


def _undamaged(path: Path) -> AbstractContextManager[None]:
    kinds = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
    return refusing(f"{path}: damaged", "pass a tokenizer with --tokenizer", kinds)
