"""Byte-pair ranks: the id of each byte sequence, tiktoken's files of ranks, and the merges that follow from them.

The `tokenizers` library spells a token in printable characters, one for each byte, and lists merges instead of ranks.
"""

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import BadInput, refusing
from common.json_files import read_regular

LARGEST_RANK = 1 << 24  # limit; real tokenizers have smaller ranks

# How the library converts the characters of a token back to bytes
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

Pair = tuple[bytes, bytes]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks in a .tiktoken file. Raises BadInput if the file is damaged."""
    with refusing(f"{path}: cannot be read", "pass another --tokenizer", (OSError,)):
        data = read_regular(path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise BadInput(f"{path}: line {number}: got {line[:40]!r}, wanted 'BASE64 RANK'") from error
    ids = {*ranks.values()}
    if not len(ids) == len(ranks) == len(data.splitlines()) >= 256 or not 0 <= min(ids) <= max(ids) < LARGEST_RANK:
        raise BadInput(f"{path}: got {len(ids)} ranks, wanted at least 256, and every token and rank only once")
    return ranks


def ranks_text(ranks: dict[bytes, int]) -> bytes:
    """Return the content of a .tiktoken file."""
    tokens = sorted(ranks, key=ranks.__getitem__)
    return b"".join(b"%b %d\n" % (base64.b64encode(token), ranks[token]) for token in tokens)


def merges(ranks: dict[bytes, int]) -> tuple[list[Pair], list[bytes]]:
    """Return the merges, in order, that encode text as the ranks do, and the tokens that these merges do not form.

    If earlier merges do not turn the bytes of a token into exactly two parts, all pairs that could form the token are
    listed, because a later merge may put such a pair side by side. If a match of the splitting pattern is exactly
    this token, it is still encoded as one id.
    """
    pairs: list[Pair] = []
    unreached: list[bytes] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        halves = _halves(token, ranks)
        if halves is not None:
            pairs.append(halves)
            continue
        unreached.append(token)
        splits = [(token[:position], token[position:]) for position in range(1, len(token))]
        pairs += [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
    return pairs, unreached


def printable_letters() -> dict[int, str]:
    """Return the table that translates Latin-1 characters to GPT-2's printable characters for the same bytes.

    The table contains only the bytes that have no printable character in Latin-1. GPT-2's characters for these bytes
    start at U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable_bytes = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(0x100 + index) for index, byte in enumerate(unprintable_bytes)}


def library_values(
    ranks: dict[bytes, int],
    added_tokens: Sequence[dict[str, Any]],
    pre_tokenizer: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of tokenizer.json, the file of the `tokenizers` library, for byte-pair ranks.

    `added_tokens` are in the order of their ids, and have the same keys as in that file. The library gives an added
    token its id only if the token is a word of the model, or if the id is the next one after the ids of the words.
    """
    letters = printable_letters()
    spelled = {token: token.decode("latin-1").translate(letters) for token in ranks}
    pairs, unreached = merges(ranks)
    ids = {token["content"]: token["id"] for token in added_tokens}
    ids_follow_words = [*ids.values()] == [*range(len(ranks), len(ranks) + len(ids))]
    return {
        "version": "1.0",
        **dict.fromkeys(["truncation", "padding"]),
        "normalizer": normalizer,
        "post_processor": None,
        "added_tokens": [*added_tokens],
        "pre_tokenizer": pre_tokenizer,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {spelled[token]: ranks[token] for token in ranks} | ({} if ids_follow_words else ids),
            "merges": [f"{spelled[left]} {spelled[right]}" for left, right in pairs],
            **({"ignore_merges": True} if unreached else {}),
        },
    }


def _halves(token: bytes, ranks: dict[bytes, int]) -> Pair | None:
    """Apply all earlier merges to a token. Return the two parts that remain, or None if there are more parts."""
    parts, rank = [token[at : at + 1] for at in range(len(token))], ranks[token]
    while len(parts) > 2:
        merged = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
        first = merged.index(min(merged))
        if merged[first] >= rank:
            return None
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return (parts[0], parts[1]) if all(part in ranks for part in parts) else None
