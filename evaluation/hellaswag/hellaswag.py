"""Does the model know how a situation goes on: HellaSwag (Zellers et al., 2019), counted in both published ways.

They differ in the text around an ending, in where it is cut into tokens, and in what acc_norm divides by; accuracies
may be compared within one of them only.
"""

import math
import re

import attrs
import numpy as np
import torch

from common.errors import BadInput
from evaluation.hellaswag.items import ENDINGS, Item
from evaluation.loss.held_out_loss import BATCH_TOKENS, prediction_losses
from evaluation.shared.intervals import plus_minus
from evaluation.shared.load import Trained
from evaluation.shared.split_over_ranks import share
from model.gpt import GPT
from tokens.tokenizer.tokenizer import Tokenizer
from training.parallel.process_group import Ranks


@attrs.frozen
class Choice:
    """An ending behind its context."""

    tokens: np.ndarray  # of both, 1-D
    scored: int  # how many of them, at the end, are to be predicted
    characters: int | None  # that acc_norm divides by; None: it divides by `scored`


@attrs.frozen(kw_only=True)
class Accuracy:
    """How often the true ending was the likeliest: as a whole (acc), and by its length (acc_norm)."""

    acc: float
    acc_error: float | None  # standard error, binomial; None where there is one item
    acc_norm: float
    acc_norm_error: float | None
    hits: str  # a bit for each item, in order, in hexadecimal; so that two models can be compared item by item
    hits_norm: str


@attrs.frozen(kw_only=True)
class HellaSwag:
    """What a model scores on a set of items."""

    items: int
    cut: int  # items of which the model's context did not hold all
    completion: Accuracy
    lm_eval: Accuracy


def measure(trained: Trained, items: list[Item], ranks: Ranks) -> HellaSwag:
    """Return a model's accuracies; call it on every rank. Raises BadInput for likelihoods that are not finite."""
    length = trained.network.config.context_length
    accuracies = {}
    cut: set[int] = set()
    for name, convention in (("completion", completion), ("lm_eval", lm_eval)):
        choices = [choice for item in items for choice in convention(item, trained.tokenizer)]
        cut.update(index // ENDINGS for index, choice in enumerate(choices) if len(choice.tokens) > length + 1)
        choices = [fitted(choice, length) for choice in choices]
        likelihoods = log_likelihoods(trained, choices, ranks)
        if not np.isfinite(likelihoods).all():
            raise BadInput(
                f"{trained.place.path}: its loss is not finite: the weights are damaged, or training diverged"
            )
        accuracies[name] = accuracy(likelihoods, choices, [item.label for item in items])
    return HellaSwag(items=len(items), cut=len(cut), **accuracies)


def completion(item: Item, tokenizer: Tokenizer) -> list[Choice]:
    """Return an item's choices as karpathy/build-nanogpt and llm.c have them (hellaswag.py): encoded apart."""
    context = tokenizer.encode(item.context)
    endings = [tokenizer.encode(f" {ending}") for ending in item.endings]
    return [Choice(np.concatenate([context, ending]), len(ending), None) for ending in endings]


def lm_eval(item: Item, tokenizer: Tokenizer) -> list[Choice]:
    """Return an item's choices as EleutherAI/lm-evaluation-harness 0.4 has them: with the topic, encoded in one.

    Its tasks/hellaswag/utils.py makes the texts, its api/model.py the tokens.
    """
    query = cleaned(f"{item.topic}: {item.context_a} {item.context_b.capitalize()}")
    begin = len(tokenizer.encode(query.rstrip()))  # spaces at the end of the context count for the ending
    choices = []
    for ending in map(cleaned, item.endings):
        tokens = tokenizer.encode(f"{query} {ending}")
        choices.append(Choice(tokens, len(tokens) - begin, len(ending)))
    return choices


def cleaned(text: str) -> str:
    """Return a text without the marks that WikiHow left in it, as lm-evaluation-harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def fitted(choice: Choice, context_length: int) -> Choice:
    """Return what of a choice the context holds: its last tokens, as lm-evaluation-harness takes them."""
    return attrs.evolve(
        choice, tokens=choice.tokens[-(context_length + 1) :], scored=min(choice.scored, context_length)
    )


def log_likelihoods(trained: Trained, choices: list[Choice], ranks: Ranks) -> np.ndarray:
    """Return the log-probability of each ending behind its context, nats, fp64 (choices,), on every rank."""
    order = sorted(range(len(choices)), key=lambda index: -len(choices[index].tokens))
    batches = []
    while order:
        size = max(1, BATCH_TOKENS // len(choices[order[0]].tokens))
        batches.append(order[:size])
        order = order[size:]
    found = share(
        ranks, batches, lambda batch: _batch(trained.network, [choices[index] for index in batch], ranks.device)
    )
    likelihoods = np.empty(len(choices))
    likelihoods[[index for batch in batches for index in batch]] = np.concatenate(found)
    return likelihoods


def accuracy(likelihoods: np.ndarray, choices: list[Choice], labels: list[int]) -> Accuracy:
    """Return how often the true one of four choices is the likeliest; the first of equal ones counts as that."""
    lengths = np.array([choice.scored if choice.characters is None else choice.characters for choice in choices])
    with np.errstate(divide="ignore"):  # an ending that is nothing but marks is never chosen
        means = likelihoods / lengths
    hits, hits_norm = (values.reshape(-1, ENDINGS).argmax(1) == labels for values in (likelihoods, means))
    return Accuracy(
        acc=float(hits.mean()),
        acc_error=_error(hits),
        acc_norm=float(hits_norm.mean()),
        acc_norm_error=_error(hits_norm),
        hits=np.packbits(hits).tobytes().hex(),
        hits_norm=np.packbits(hits_norm).tobytes().hex(),
    )


def describe(result: Accuracy) -> str:
    """Return accuracies for people."""
    pairs = (("acc", result.acc, result.acc_error), ("acc_norm", result.acc_norm, result.acc_norm_error))
    return ", ".join(f"{name} {plus_minus(value, error, 4)}" for name, value, error in pairs)


def _batch(network: GPT, choices: list[Choice], device: torch.device) -> np.ndarray:
    """Return the log-probabilities of the endings, fp64 (B,). What stands behind the end of a row changes nothing."""
    shape = len(choices), len(choices[0].tokens)  # the longest comes first
    tokens, counts = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, choice in enumerate(choices):
        end = len(choice.tokens)
        tokens[row, :end] = choice.tokens
        counts[row, end - choice.scored : end] = True
    losses = prediction_losses(network, torch.from_numpy(tokens).to(device)).cpu().numpy()
    return -(losses * counts[:, 1:]).sum(axis=1, dtype=np.float64)


def _error(hits: np.ndarray) -> float | None:
    mean, number = float(hits.mean()), len(hits)
    return math.sqrt(mean * (1 - mean) / (number - 1)) if number > 1 else None
