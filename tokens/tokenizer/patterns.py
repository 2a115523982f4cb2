"""Splitting patterns of byte-pair tokenizers: merges stay within their matches, which cover every text.

They use no possessive repetition and no `$`, which engines read differently, so that tiktoken, fastokens and Hugging
Face's tokenizers split alike. For the ranks of cl100k, tiktoken's own form gives the same ids: it leaves white space at
the end of a text whole, but no rank spans a line end and the text after it.
"""

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITE_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _of_words(digits: str) -> str:
    """Return the pattern in which up to so many digits go together."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITE_SPACE}"


PATTERNS = {
    "gpt2": GPT2,
    "cl100k": _of_words(r"\p{N}{1,3}"),  # Llama 3's as well
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITE_SPACE}"
    ),
    "qwen2": _of_words(r"\p{N}"),
}
