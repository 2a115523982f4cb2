"""Byte-pair ranks: the id of each byte sequence, and tiktoken's files of them."""

import base64
from pathlib import Path

from common.errors import BadInput
from common.json_files import read_regular

LARGEST_RANK = 1 << 24  # of any tokenizer


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
    ids = {*ranks.values()}
    if not len(ids) == len(ranks) == len(data.splitlines()) >= 256 or not 0 <= min(ids) <= max(ids) < LARGEST_RANK:
        raise BadInput(f"{path}: got {len(ids)} ranks, wanted at least 256, each of 0, 1, 2, ... and each token once")
    return ranks


def ranks_text(ranks: dict[bytes, int]) -> bytes:
    """Return the content of a .tiktoken file."""
    tokens = sorted(ranks, key=ranks.__getitem__)
    return b"".join(b"%b %d\n" % (base64.b64encode(token), ranks[token]) for token in tokens)
