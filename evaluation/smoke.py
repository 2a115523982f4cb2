"""Does the model speak at all? One prompt, one continuation, and a refusal of output that is no output."""

from errors import BadInput
from evaluation.load import Trained
from model.generate import Sampling, generate

REPEATED_TOKENS = 10  # so many tokens, all the same, are no text


def smoke(trained: Trained, prompt: str, count: int, sampling: Sampling) -> str:
    """Return the prompt with `count` new tokens. Raises BadInput when they are empty, not finite or all the same."""
    ids = [int(token) for token in trained.tokenizer.encode(prompt)]
    try:
        chosen = generate(trained.network, ids, count, sampling)
    except ValueError as error:
        raise BadInput(f"{trained.path}: {error}") from error
    text = _decode(trained, chosen)
    if not text:
        raise BadInput(f"{trained.path}: degenerate output: {count} tokens that decode to nothing")
    if len(chosen) >= REPEATED_TOKENS and len(set(chosen)) == 1:
        raise BadInput(f"{trained.path}: degenerate output: {count} times the same token, {text[:20]!r}")
    return prompt + text


def _decode(trained: Trained, chosen: list[int]) -> str:
    """Return the text of the ids; ids between tokenizer and model vocabulary stand for nothing."""
    return trained.tokenizer.decode([token for token in chosen if token < trained.tokenizer.vocabulary_size])
