"""Hugging Face tokenizer files: a tokenizer to tokenizer.json, vocab.json and merges.txt, and back.

There a token is spelled in printable characters, one for each byte, and merges are listed; here it has a rank.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from common.errors import BadInput, quoted, refusing
from common.files import replace_file
from common.json_files import parse_json, read_regular
from tokens.tokenizer.known import GPT2, PATTERNS, recognized
from tokens.tokenizer.ranks import merges
from tokens.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, byte_pair_tokenizer

if TYPE_CHECKING:
    from tokens.tokenizer.template import Template

TOKENIZER, SETTINGS, VOCABULARY, MERGES = "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # of a text, where tokenizer_config.json names no eos_token
# GPT-2's pre-tokenization pattern is part of ByteLevel.
SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Known keys, each with the values whose ids are known: with (), any does; a dict: of an object, or of each in a list.
# ByteLevel adds no tokens and splits nothing: its other options move offsets, and a space before a decoded text.
KNOWN_BYTE_LEVEL = {"type": ("ByteLevel",), **dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), ())}
KNOWN: dict[str, Any] = {  # of tokenizer.json
    **dict.fromkeys(("version", "pre_tokenizer", "post_processor"), ()),
    **dict.fromkeys(("truncation", "padding", "normalizer"), (None,)),
    "decoder": KNOWN_BYTE_LEVEL,
    "added_tokens": {
        **dict.fromkeys(("id", "content", "normalized"), ()),  # there is no normalizer
        "special": (True,),
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
KNOWN_TEMPLATE = {  # one that adds no tokens, as transformers writes it
    "type": ("TemplateProcessing",),
    "single": ([{"Sequence": {"id": "A", "type_id": 0}}],),
    "pair": (),  # of texts, which are never encoded
    "special_tokens": ({},),
}
KNOWN_SPLIT = {
    "type": ("Split",),
    "pattern": tuple({"Regex": pattern} for pattern in PATTERNS.values()),
    "behavior": ("Isolated",),  # the patterns cover every text
    "invert": (False,),
}
CLASSES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")  # whose fast ones are their tokenizer.json
KNOWN_SETTINGS: dict[str, tuple[Any, ...]] = {  # of tokenizer_config.json, which has others that change no ids
    "tokenizer_class": (
        *(each for name in CLASSES for each in (name, f"{name}Fast")),
        *("PreTrainedTokenizerFast", "TokenizersBackend", None),
    ),
    **dict.fromkeys(("add_prefix_space", "add_bos_token", "add_eos_token", "split_special_tokens"), (False, None)),
}


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """Return the text of tokenizer.json. Raises BadInput for characters of several bytes, which no merges give."""
    ranks, letters = tokenizer.coder.ranks, _letters()
    spelled = {token: token.decode("latin-1").translate(letters) for token in ranks}
    if tokenizer.characters is not None and any(len(token) > 1 for token in ranks):
        raise BadInput(f"tokenizer {tokenizer.name}: no sequence of merges gives its characters; it cannot be exported")
    pairs, unreached = merges(ranks)
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    sequence = {"type": "Sequence", "pretokenizers": [split, {**SPLITTING, "use_regex": False}]}
    special = dict(sorted(tokenizer.special_tokens.items(), key=lambda item: item[1]))
    follow = [*special.values()] == [*range(len(ranks), len(ranks) + len(special))]
    options = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    values = {
        "version": "1.0",
        **dict.fromkeys(["truncation", "padding", "normalizer", "post_processor"]),
        "added_tokens": [
            {"id": number, "content": name, "special": True, **options} for name, number in special.items()
        ],
        "pre_tokenizer": SPLITTING if tokenizer.pattern in (None, GPT2) else sequence,
        "decoder": SPLITTING,
        "model": {
            "type": "BPE",
            # An added token has its id only where it is a word, too, or the next one after the words.
            "vocab": {spelled[token]: ranks[token] for token in ranks} | ({} if follow else special),
            "merges": [f"{spelled[left]} {spelled[right]}" for left, right in pairs],
            **({"ignore_merges": True} if unreached else {}),
        },
    }
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


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
        return read_tokenizer_json(path)
    path = directory / VOCABULARY
    if not path.is_file():
        return None
    with _undamaged(path):
        vocabulary = parse_json(read_regular(path))
        end = vocabulary.pop(END_OF_TEXT, None)
        tokenizer = byte_pair_tokenizer(directory.name, ranks_of(vocabulary))
        if recognized(tokenizer.coder.ranks) != "gpt2" or end != tokenizer.end_of_text_id:  # no pattern is named here
            raise _refused(path, f"got {tokenizer.vocabulary_size:,} ids of an unknown tokenizer, without {TOKENIZER}")
        _check_settings(directory, tokenizer)
    return tokenizer


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Return the tokenizer of a file and the settings beside it. Raises BadInput for keys that give other ids."""
    with _undamaged(path):
        values = parse_json(read_regular(path))
        model, added = values["model"], values.get("added_tokens") or []
        words = model["vocab"]
        _check_known(path, "", values, KNOWN)
        for step in _steps(values.get("post_processor"), "processors"):
            is_template = step.get("type") in KNOWN_TEMPLATE["type"]
            _check_known(path, "post_processor: ", step, KNOWN_TEMPLATE if is_template else KNOWN_BYTE_LEVEL)
        if not added:
            raise _refused(path, "added_tokens: got none")
        pattern = _pattern(path, values["pre_tokenizer"])
        special = {token["content"]: token["id"] for token in added}
        ranks = ranks_of({word: number for word, number in words.items() if word not in special})
        ids = [*ranks.values(), *special.values()]
        if len(set(ids)) < len(ids) or len(special) < len(added) or any(type(number) is not int for number in ids):
            raise _refused(path, "added_tokens: got an id or a content twice")
        _check_merges(path, model, ranks)
        name = path.parent.name if path.name == TOKENIZER else path.stem
        tokenizer = byte_pair_tokenizer(name or path.stem, ranks, pattern)
        tokenizer = attrs.evolve(tokenizer, special_tokens=special, end_of_text=_end_of_text(path, special))
        _check_settings(path.parent, tokenizer)
    return tokenizer


def ranks_of(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Return the ranks of a vocabulary in printable characters. Raises ValueError for one that spells no bytes."""
    letters = _letters()
    bytes_of = {chr(byte).translate(letters): byte for byte in range(256)}
    if others := [letter for letter in sorted({*"".join(vocabulary)}) if letter not in bytes_of]:
        raise ValueError(f"model: vocab: character {others[0]!r} stands for no byte")
    return {bytes(bytes_of[letter] for letter in word): rank for word, rank in vocabulary.items()}


def _pattern(path: Path, splitting: dict[str, Any] | None) -> str:
    """Return the splitting pattern of a pre-tokenizer: ByteLevel, or Split before it. Raises BadInput for another."""
    steps = _steps(splitting, "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise _refused(path, f"pre_tokenizer: got {quoted(kinds)}")
    known = {**KNOWN_BYTE_LEVEL, "add_prefix_space": (False,), "use_regex": (len(steps) == 1,)}
    _check_known(path, "pre_tokenizer: ByteLevel: ", {"use_regex": True, **steps[-1]}, known)
    if len(steps) == 1:
        return GPT2
    _check_known(path, "pre_tokenizer: Split: ", {**dict.fromkeys(KNOWN_SPLIT), **steps[0]}, KNOWN_SPLIT)
    return str(steps[0]["pattern"]["Regex"])


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, which it has under a key; of another step itself."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _check_merges(path: Path, model: dict[str, Any], ranks: dict[bytes, int]) -> None:
    """Raise BadInput unless merges encode as the ranks do. More pairs than needed never come to be side by side."""
    wanted, unreached = merges(ranks)
    letters, words = _letters(), model["vocab"]
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


def _check_settings(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise BadInput where tokenizer_config.json and the like change what tokenizer.json says."""
    for path in (directory / name for name in (SETTINGS, SPECIAL, ADDED)):
        values = parse_json(read_regular(path)) if path.is_file() else {}
        if path.name == ADDED:
            values = {"added_tokens_decoder": {str(number): {"content": text} for text, number in values.items()}}
        _check_known(path, "", {key: values[key] for key in KNOWN_SETTINGS if key in values}, KNOWN_SETTINGS)
        special = {key: value for key, value in values.items() if key.endswith("_token") and type(value) is not bool}
        for key, value in special.items():
            content = value.get("content") if isinstance(value, dict) else value
            if content is not None and content not in tokenizer.special_tokens:
                raise _refused(path, f"{key}: got {quoted(content)}")
        for number, token in (values.get("added_tokens_decoder") or {}).items():
            if str(tokenizer.special_tokens.get(token["content"])) != number:
                raise _refused(path, f"added_tokens_decoder: {quoted(number)}: got {quoted(token['content'])}")


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
    wanted = "byte-level BPE as of GPT-2, cl100k, Llama 3 or o200k"
    advice = "if the model was trained on tokens of gpt2 or bytes, pass that with --tokenizer"
    return BadInput(f"{path}: {got}: not implemented, wanted {wanted}; {advice}")


def _undamaged(path: Path) -> AbstractContextManager[None]:
    kinds = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
    return refusing(f"{path}: damaged", "pass a tokenizer with --tokenizer", kinds)


def _letters() -> dict[int, str]:
    """Return GPT-2's printable character for each byte: that of Latin-1, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(0x100 + index) for index, byte in enumerate(others)}
