"""Hugging Face tokenizer files: byte-pair ranks to tokenizer.json, vocab.json and merges.txt, and back.

There a token is spelled in printable characters, one for each byte, and the encoding is a list of merges. Here, as in
tiktoken, it is a rank for each byte sequence. Either follows from the other.
"""

import json
from pathlib import Path
from typing import Any

from common.errors import BadInput, quoted
from common.files import replace_file
from common.json_files import parse_json, read_regular
from tokens.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, byte_pair_tokenizer

TOKENIZER, SETTINGS, VOCABULARY, MERGES = "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"
# GPT-2's pre-tokenization pattern is part of ByteLevel.
SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


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

    Raises BadInput unless it is a byte-level byte-pair encoding with GPT-2's pre-tokenization pattern.
    """
    path = directory / TOKENIZER
    try:
        if path.is_file():
            values = parse_json(read_regular(path))
            splitting, model = values["pre_tokenizer"] or {}, values["model"]
            if model["type"] != "BPE" or any(
                splitting.get(key) != SPLITTING[key] for key in ("type", "add_prefix_space")
            ):
                raise BadInput(f"{path}: no tokenizer like GPT-2's; pass the model's with --tokenizer")
            return _from_spelled(model["vocab"], path)
        path = directory / VOCABULARY
        return _from_spelled(parse_json(read_regular(path)), path) if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: damaged: {quoted(error)}; pass a tokenizer with --tokenizer") from error


def _from_spelled(vocabulary: dict[str, int], path: Path) -> Tokenizer:
    letters = _letters()
    bytes_of = {chr(byte).translate(letters): byte for byte in range(256)}
    ranks = {
        bytes(bytes_of[letter] for letter in spelling): rank
        for spelling, rank in vocabulary.items()
        if spelling != END_OF_TEXT
    }
    if sorted(ranks.values()) != list(range(len(ranks))) or vocabulary.get(END_OF_TEXT, len(ranks)) != len(ranks):
        raise BadInput(
            f"{path}: got {len(ranks)} tokens, wanted the ids 0, 1, 2, ... once each and {END_OF_TEXT} after them; "
            "pass a tokenizer with --tokenizer"
        )
    return byte_pair_tokenizer(path.parent.name, ranks, ranks_file=None)


def _halves(ranks: dict[bytes, int]) -> dict[bytes, tuple[bytes, bytes]] | None:
    """Return the two tokens whose merge gives each longer one, in the order of ranks; None if one has no such pair."""
    halves: dict[bytes, tuple[bytes, bytes]] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        rank = ranks[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if ranks.get(left, rank) < rank > ranks.get(right, rank) and _meet(left, right, rank, ranks, halves):
                halves[token] = left, right
                break
        else:
            return None
    return halves


def _meet(left: bytes, right: bytes, rank: int, ranks: dict[bytes, int], halves: dict[bytes, Any]) -> bool:
    """Tell whether byte-pair encoding of left + right has exactly these two tokens before the merge of that rank.

    It has unless the neighbors of their boundary merge earlier. That is checked backwards in time: the later of the
    two tokens is taken apart, of equal ones the right one, since merges go from left to right.
    """
    left_ends = right_ends = rank  # when the neighbour on that side is merged into a longer token
    left_rank, right_rank = ranks[left], ranks[right]
    while len(left) > 1 or len(right) > 1:
        if len(left) > 1 and (left_rank > right_rank or len(right) == 1):
            left_ends, left = left_rank, halves[left][1]
            left_rank = ranks[left]
        else:
            right_ends, right = right_rank, halves[right][0]
            right_rank = ranks[right]
        merged = ranks.get(left + right, rank)
        if merged < left_ends and merged <= right_ends:
            return False
    return True


def _letters() -> dict[int, str]:
    """Return the printable character that stands for each byte in GPT-2's vocabulary files.

    A byte that Latin-1 prints stands for itself; the others follow from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(0x100 + index) for index, byte in enumerate(others)}
