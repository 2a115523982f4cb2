"""Does the model speak at all? One prompt, one continuation, and a refusal of output that is no output."""

from errors import BadInput
from evaluation.load import Trained
from model.generate import Sampling, generate

REPEATED_TOKENS = 10  # so many tokens that only repeat a few are no text
LONGEST_CYCLE = 3  # tokens


def smoke(trained: Trained, prompt: str, count: int, sampling: Sampling) -> str:
    """Return the prompt with `count` new tokens. Raises BadInput when they are blank, not finite or a repetition."""
    ids = [int(token) for token in trained.tokenizer.encode(prompt)]
    try:
        chosen = generate(trained.network, ids, count, sampling)
    except ValueError as error:
        raise BadInput(f"{trained.place.path}: {error}") from error
    text = _decode(trained, chosen)
    if not text.strip():
        raise BadInput(f"{trained.place.path}: degenerate output: {count} tokens that decode to {text[:20]!r}")
    if (cycle := shortest_cycle(chosen)) is not None:
        raise BadInput(
            f"{trained.place.path}: degenerate output: {count} tokens that repeat every {cycle}, {text[:20]!r}"
        )
    return prompt + text


def shortest_cycle(tokens: list[int]) -> int | None:
    """Return after how many tokens a sequence repeats itself to its end, or None for one that does not."""
    if len(tokens) < REPEATED_TOKENS:
        return None
    return next((n for n in range(1, LONGEST_CYCLE + 1) if tokens[n:] == tokens[:-n]), None)


def _decode(trained: Trained, chosen: list[int]) -> str:
    """Return the text of the ids; ids between tokenizer and model vocabulary stand for nothing."""
    return trained.tokenizer.decode([token for token in chosen if token < trained.tokenizer.vocabulary_size])
