"""Byte-pair ranks: the id of each byte sequence, and tiktoken's files of them."""

import base64
import hashlib
from pathlib import Path

from common.errors import BadInput
from common.json_files import read_regular

GPT2_RANKS = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # sha256 of r50k_base.tiktoken


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


def ranks_text(ranks: dict[bytes, int]) -> bytes:
    """Return the content of a .tiktoken file."""
    tokens = sorted(ranks, key=ranks.__getitem__)
    return b"".join(b"%b %d\n" % (base64.b64encode(token), ranks[token]) for token in tokens)


def is_gpt2(ranks: dict[bytes, int]) -> bool:
    """Tell by their content whether ranks are GPT-2's."""
    return hashlib.sha256(ranks_text(ranks)).hexdigest() == GPT2_RANKS
