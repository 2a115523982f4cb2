"""Known tokenizers: splitting patterns and special tokens for published files of ranks, which contain neither.

Merges stay within the matches of a pattern, and the matches cover every text. The patterns use neither possessive
repetition nor `$`, because engines interpret these differently. cl100k's pattern differs from tiktoken's, but gives the
same ids, because no rank contains text after a line end.
"""

import hashlib

import attrs

from tokens.tokenizer.ranks import ranks_text

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITE_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _of_words(digits: str) -> str:
    """Return a splitting pattern in which digits are matched by the regular expression `digits`."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITE_SPACE}"


PATTERNS = {
    "gpt2": GPT2,
    "cl100k": _of_words(r"\p{N}{1,3}"),  # also the pattern of Llama 3
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITE_SPACE}"
    ),
    "qwen2": _of_words(r"\p{N}"),
}


@attrs.frozen(kw_only=True)
class KnownTokenizer:
    """What is published about a tokenizer in addition to its ranks."""

    ranks_sha256: str  # hash of the published file of ranks
    pattern: str
    special_tokens: dict[str, int]
    end_of_text: str = "<|endoftext|>"
    encoding: str | None  # name under which tiktoken downloads the ranks; None if they are not public


_LLAMA3 = (  # from Meta's llama3/tokenizer.py: 256 tokens after 128,000 ranks
    *("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{number}|>" for number in range(4))),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)
_PROMPT_ENDS = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
# Hashes and special tokens are from tiktoken_ext/openai_public.py. Llama 3's hash is the hash of its tokenizer.model.
KNOWN_TOKENIZERS = {
    "gpt2": KnownTokenizer(
        ranks_sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        pattern=GPT2,
        special_tokens={"<|endoftext|>": 50256},
        encoding="gpt2",
    ),
    "cl100k": KnownTokenizer(
        ranks_sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        pattern=PATTERNS["cl100k"],
        special_tokens={"<|endoftext|>": 100257, **_PROMPT_ENDS},
        encoding="cl100k_base",
    ),
    "o200k": KnownTokenizer(
        ranks_sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        pattern=PATTERNS["o200k"],
        special_tokens={"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
        encoding="o200k_base",
    ),
    "llama3": KnownTokenizer(
        ranks_sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        pattern=PATTERNS["cl100k"],
        special_tokens={name: 128_000 + number for number, name in enumerate(_LLAMA3)},
        end_of_text="<|end_of_text|>",
        encoding=None,
    ),
}


def recognized(ranks: dict[bytes, int], file_sha256: str | None = None) -> str | None:
    """Return the name of the known tokenizer that has these ranks, judging by their content or by their file's hash.

    Returns None if the ranks are unknown.
    """
    digests = (file_sha256, hashlib.sha256(ranks_text(ranks)).hexdigest())
    return next((name for name, published in KNOWN_TOKENIZERS.items() if published.ranks_sha256 in digests), None)
