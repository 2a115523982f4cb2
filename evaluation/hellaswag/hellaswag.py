"""HellaSwag (Zellers et al., 2019): accuracy of the likeliest ending, by both published conventions.

They differ in the text around an ending, in where it is split into tokens, and in the length by which acc_norm divides;
accuracies are comparable only within one convention.
"""

import re

import attrs
import numpy as np
import torch

from common.errors import BadInput
from evaluation.hellaswag.items import ENDINGS, Item
from evaluation.loss.held_out_loss import BATCH_TOKENS, prediction_losses
from evaluation.shared.load import Trained
from evaluation.shared.significance import mean_and_error, plus_minus
from evaluation.shared.split_over_ranks import share
from tokens.tokenizer.tokenizer import Tokenizer
from training.parallel.process_group import Ranks


@attrs.frozen
class Choice:
    """A context followed by one ending."""

    tokens: np.ndarray  # of context and ending, 1-D
    scored: int  # number of them, at the end, whose loss counts
    characters: int | None  # divisor of acc_norm; None: `scored`


@attrs.frozen(kw_only=True)
class Accuracy:
    """Share of items whose true ending is the likeliest: in total (acc), and by its length (acc_norm)."""

    acc: float
    acc_error: float | None  # standard error, binomial; None where there is one item
    acc_norm: float
    acc_norm_error: float | None
    hits: str  # a bit for each item, in order, in hexadecimal: for paired comparison
    hits_norm: str

    def __str__(self) -> str:
        acc, acc_norm = plus_minus(self.acc, self.acc_error, 4), plus_minus(self.acc_norm, self.acc_norm_error, 4)
        return f"acc {acc}, acc_norm {acc_norm}"


@attrs.frozen(kw_only=True)
class HellaSwag:
    """A model's accuracies on a set of items."""

    items: int
    cut: int  # items longer than the model's context
    completion: Accuracy
    lm_eval: Accuracy

    def __str__(self) -> str:
        cut = f"; {self.cut:,} items were cut to the context" if self.cut else ""
        return f"completion: {self.completion}; lm-eval: {self.lm_eval}{cut}"


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
        accuracies[name] = accuracy(likelihoods, choices, [int(item.label) for item in items])
    return HellaSwag(items=len(items), cut=len(cut), **accuracies)


def completion(item: Item, tokenizer: Tokenizer) -> list[Choice]:
    """Return an item's choices as karpathy/build-nanogpt and llm.c make them (hellaswag.py): encoded separately."""
    context = tokenizer.encode(item.ctx)
    endings = [tokenizer.encode(f" {ending}") for ending in item.endings]
    return [Choice(np.concatenate([context, ending]), len(ending), None) for ending in endings]


def lm_eval(item: Item, tokenizer: Tokenizer) -> list[Choice]:
    """Return an item's choices as EleutherAI/lm-evaluation-harness 0.4 makes them: with the topic, encoded together.

    Its tasks/hellaswag/utils.py makes the texts, its api/model.py the tokens.
    """
    query = cleaned(f"{item.activity_label}: {item.ctx_a} {item.ctx_b.capitalize()}")
    begin = len(tokenizer.encode(query.rstrip()))  # trailing spaces of the context belong to the ending
    choices = []
    for ending in map(cleaned, item.endings):
        tokens = tokenizer.encode(f"{query} {ending}")
        choices.append(Choice(tokens, len(tokens) - begin, len(ending)))
    return choices


def cleaned(text: str) -> str:
    """Return a text without WikiHow's markup, as lm-evaluation-harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def fitted(choice: Choice, context_length: int) -> Choice:
    """Return a choice cut to the last tokens that the context holds, as lm-evaluation-harness does."""
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
    found = share(ranks, batches, lambda batch: _batch(trained, [choices[index] for index in batch]))
    likelihoods = np.empty(len(choices))
    likelihoods[[index for batch in batches for index in batch]] = np.concatenate(found)
    return likelihoods


def accuracy(likelihoods: np.ndarray, choices: list[Choice], labels: list[int]) -> Accuracy:
    """Return how often the true one of four choices is the likeliest; of equal ones the first counts."""
    lengths = np.array([choice.scored if choice.characters is None else choice.characters for choice in choices])
    with np.errstate(divide="ignore"):  # an ending of nothing but markup has length 0 and is never chosen
        means = likelihoods / lengths
    hits, hits_norm = (values.reshape(-1, ENDINGS).argmax(1) == labels for values in (likelihoods, means))
    return Accuracy(
        acc=float(hits.mean()),
        acc_error=mean_and_error(hits)[1],
        acc_norm=float(hits_norm.mean()),
        acc_norm_error=mean_and_error(hits_norm)[1],
        hits=np.packbits(hits).tobytes().hex(),
        hits_norm=np.packbits(hits_norm).tobytes().hex(),
    )


def _batch(trained: Trained, choices: list[Choice]) -> np.ndarray:
    """Return the log-probabilities of the endings, fp64 (B,). Padding after the end of a row has no effect."""
    shape = len(choices), len(choices[0].tokens)  # the longest comes first
    tokens, counts = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, choice in enumerate(choices):
        end = len(choice.tokens)
        tokens[row, :end] = choice.tokens
        counts[row, end - choice.scored : end] = True
    losses = prediction_losses(trained.network, torch.from_numpy(tokens)).cpu().numpy()
    return -(losses * counts[:, 1:]).sum(axis=1, dtype=np.float64)
