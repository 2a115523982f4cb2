"""Merges of byte pairs, from ranks: the encoding of Hugging Face's files, which list pairs instead of ranks."""

import itertools

Pair = tuple[bytes, bytes]


def merges(ranks: dict[bytes, int]) -> tuple[list[Pair], list[bytes]]:
    """Return the pairs whose merges, in this order, encode as the ranks do; and the tokens that no merges reach.

    A token that its own bytes do not become by merges before it has all pairs here that give it: a later merge may put
    one of them side by side. By itself such a token is encoded as a whole.
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
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs += [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
    return pairs, unreached


def _halves(token: bytes, ranks: dict[bytes, int]) -> Pair | None:
    """Return the two parts that become a token, after the merges before it; None if there are more."""
    parts, rank = [token[at : at + 1] for at in range(len(token))], ranks[token]
    while len(parts) > 2:
        merged = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
        first = merged.index(min(merged))
        if merged[first] >= rank:
            return None
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return (parts[0], parts[1]) if all(part in ranks for part in parts) else None
