"""Packing conversations into rows: cut at row ends or kept whole, with attention across or within conversations.

    python benchmarks/conversation_packing.py [--seeds 3]   # trains small networks on one core, six minutes

The conversations of examples/toy_dialogue.py differ in length by a factor of five. For each seed, a base model learns
stories. It is then fine-tuned with each packing on the same conversations, with the same number of rows per update.
Each held-out question is alone in its row, so a greedy answer is right if the argmax is right at every token of the
answer. Attention within conversations exists only in this file, where it is a mask. Positions are encoded with RoPE, so
the network does not see where in its row a conversation is.
"""

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import bench
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.toy_dialogue import ToyWorld
from model.config import ModelConfig
from model.gpt import GPT, initialize
from tokens.tokenizer.template import ASSISTANT, TEMPLATES, TURN_TOKENS, USER, Message
from tokens.tokenizer.tokenizer import END_OF_TEXT

# Shapes: T context, B rows of an update, N conversations, R rows
CONTEXT, ROWS = 160, 4
STORIES, BASE_STEPS, CONVERSATIONS, EPOCHS = 6_000, 1200, 300, 4
PEAK, FINE_TUNING_PEAK = 4e-3, 1e-3
# The initial weights, which are meant for wide networks, are multiplied by this factor. Without the factor, a network
# as narrow as this one does not learn attention within minutes.
WIDENED = 5
Encoded = tuple[list[int], list[int]]  # ids, weights


class WordTokenizer:
    """A tokenizer for the words and punctuation of the toy world, with the methods that Template.encode needs."""

    end_of_text = END_OF_TEXT

    def __init__(self, texts: list[str]):
        words = sorted({word for text in texts for word in self._split(text)})
        self._ids = {word: number for number, word in enumerate(words)}
        names = (END_OF_TEXT, *TURN_TOKENS)
        self.special_tokens = {name: len(words) + number for number, name in enumerate(names)}
        self.end_of_text_id, self.vocabulary_size = len(words), len(words) + len(names)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text."""
        return np.array([self._ids[word] for word in self._split(text)], np.int64)

    @staticmethod
    def _split(text: str) -> list[str]:
        return re.findall(r"\w+|[^\w\s]", text)


class Rows(NamedTuple):
    """Packed conversations."""

    ids: Tensor  # (R, T + 1); the last id of a row is the first of the next row
    weights: Tensor  # (R, T + 1); weight of each id as a target
    owner: Tensor  # (R, T + 1); number of the conversation to which an id belongs, -1 for padding
    cut: int  # number of conversations that are split between rows


def stream(conversations: list[Encoded], end: int) -> Rows:
    """Concatenate conversations, and cut them at the ends of rows."""
    ids, weights, owners = list[int](), list[int](), list[int]()
    for number, (conversation, target_weights) in enumerate(conversations):
        ids += [*conversation, end]
        weights += [*target_weights, 0]
        owners += [number] * (len(conversation) + 1)
    rows = -(-(len(ids) - 1) // CONTEXT)
    filler = rows * CONTEXT + 1 - len(ids)
    arrays = ids + [end] * filler, weights + [0] * filler, owners + [-1] * filler
    ends = np.cumsum([len(conversation) + 1 for conversation, _ in conversations]) - 1
    cut = sum(first // CONTEXT != last // CONTEXT for first, last in zip([0, *ends[:-1] + 1], ends, strict=True))
    return _windows(arrays, int(cut))


def best_fit(conversations: list[Encoded], end: int) -> Rows:
    """Put each conversation, the longest first, into the fullest row that has room for all of it."""
    rows: list[list[int]] = []
    room: list[int] = []  # free ids in each row
    for number in sorted(range(len(conversations)), key=lambda index: -len(conversations[index][0])):
        length = len(conversations[number][0]) + 1
        fitting = [row for row, free in enumerate(room) if free >= length]
        row = min(fitting, key=room.__getitem__, default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append(CONTEXT)
        rows[row].append(number)
        room[row] -= length
    ids, weights, owners = list[int](), list[int](), list[int]()
    for numbers, free in zip(rows, room, strict=True):
        for number in numbers:
            conversation, target_weights = conversations[number]
            ids += [*conversation, end]
            weights += [*target_weights, 0]
            owners += [number] * (len(conversation) + 1)
        ids += [end] * free
        weights += [0] * free
        owners += [-1] * free
    return _windows(([*ids, end], [*weights, 0], [*owners, -1]), 0)


def one_per_row(conversations: list[Encoded], end: int) -> Rows:
    """Give each conversation a separate row, as in a chat."""
    padded = []
    for number, (conversation, target_weights) in enumerate(conversations):
        rest = CONTEXT + 1 - len(conversation)
        owners = [number] * len(conversation) + [-1] * rest
        padded.append((conversation + [end] * rest, target_weights + [0] * rest, owners))
    ids, weights, owner = (torch.tensor(part) for part in zip(*padded, strict=True))
    return Rows(ids, weights, owner, 0)


PACKINGS = {"stream, cut": stream, "best fit, whole": best_fit, "one per row": one_per_row}


def _windows(arrays: tuple[list[int], list[int], list[int]], cut: int) -> Rows:
    ids, weights, owner = (torch.tensor(array).unfold(0, CONTEXT + 1, CONTEXT) for array in arrays)
    return Rows(ids, weights, owner, cut)


@contextmanager
def within(owner: Tensor | None) -> Iterator[None]:
    """Restrict attention to ids of the same conversation, with a mask instead of `is_causal`.

    If `owner` is None, attention is causal over the whole row.
    """
    plain = F.scaled_dot_product_attention
    if owner is not None:
        same = (owner[:, :, None] == owner[:, None]).tril()[:, None]  # (B, 1, T, T)
        F.scaled_dot_product_attention = lambda q, k, v, *_, **__: plain(q, k, v, attn_mask=same)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def losses(network: GPT, rows: Rows, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return the logits, (B, T, V), and the weighted mean of the targets' losses, a scalar."""
    with within(rows.owner[:, :-1] if masked else None):
        logits = network(rows.ids[:, :-1])
    token_losses = F.cross_entropy(logits.flatten(0, 1), rows.ids[:, 1:].flatten(), reduction="none")
    weights = rows.weights[:, 1:].flatten().float()
    return logits, (token_losses * weights).sum() / weights.sum()


def train(network: GPT, rows: Rows, recipe: tuple[int, float, int], *, masked: bool) -> None:
    """Train with updates of ROWS rows in random order, with linear warm-up and then linear decay.

    `recipe` has the steps, the peak learning rate, and the seed.
    """
    steps, peak, seed = recipe
    optimizer = torch.optim.AdamW(network.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    random = np.random.default_rng(seed)
    count, order = len(rows.ids), np.empty(0, np.int64)
    for step in range(steps):
        if len(order) < ROWS:
            order = np.concatenate([order, random.permutation(count)])  # the next epoch
        chosen, order = torch.from_numpy(order[:ROWS]), order[ROWS:]
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
        batch = Rows(rows.ids[chosen], rows.weights[chosen], rows.owner[chosen], 0)
        losses(network, batch, masked=masked)[1].backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def measure(network: GPT, questions: Rows) -> tuple[float, float]:
    """Return the share of questions with a right answer, and the mean loss of the answers' tokens in nats."""
    logits, loss = losses(network, questions, masked=False)
    hits = (logits.argmax(-1) == questions.ids[:, 1:]) | (questions.weights[:, 1:] == 0)
    return hits.all(dim=1).float().mean().item(), loss.item()


def one_seed(seed: int) -> dict[str, list[float]]:
    """Return the results of each packing: share of right answers, loss, padding share, cut conversations, seconds."""
    world = ToyWorld(seed)
    stories = [world.story() for _ in range(STORIES)]
    talks = [world.conversation() for _ in range(CONVERSATIONS)]
    pairs = world.questions()
    tokenizer = WordTokenizer([*stories, *(message.content for talk in talks for message in talk)])
    encode: Any = partial(TEMPLATES["turns"].encode, cast(Any, tokenizer))
    end = tokenizer.end_of_text_id
    config = ModelConfig(
        vocab_size=tokenizer.vocabulary_size, context_length=CONTEXT, emb_dim=64, n_heads=4, n_layers=2,
        norm="rmsnorm", norm_gain=False, positions="rope", activation="relu2", biases=False, tie_weights=True,
    )  # fmt: skip
    base = GPT(config)
    initialize(base, seed)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(WIDENED)
    texts = [(ids := tokenizer.encode(story).tolist(), [1] * len(ids)) for story in stories]
    train(base, stream(texts, end), (BASE_STEPS, PEAK, seed), masked=False)
    questions = one_per_row(
        [encode([Message(USER, question), Message(ASSISTANT, answer)]) for question, answer in pairs], end
    )
    conversations = [encode(talk) for talk in talks]
    results = {}
    for (name, pack), masked in product(PACKINGS.items(), (False, True)):
        if name == "one per row" and masked:
            continue
        rows, network = pack(conversations, end), GPT(config)
        network.load_state_dict(base.state_dict())
        began, steps = time.process_time(), max(1, EPOCHS * len(rows.ids) // ROWS)
        train(network, rows, (steps, FINE_TUNING_PEAK, seed), masked=masked)
        padding = (rows.owner[:, :-1] == -1).float().mean().item()
        attention = "-" if name == "one per row" else "within each" if masked else "across"
        seconds = time.process_time() - began
        results[f"{name}; {attention}"] = [*measure(network, questions), padding, rows.cut, seconds]
    return results


def main(*, seeds: int = 3) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    results = [one_seed(seed) for seed in range(seeds)]
    rows = []
    for name in results[0]:
        right, loss, padding, cut, seconds = (
            [seed_results[name][column] for seed_results in results] for column in range(len(results[0][name]))
        )
        rows.append([
            *name.split("; "), _spread(right, 100, "%"), _spread(loss, 1, ""),
            f"{statistics.fmean(padding):.1%}", f"{statistics.fmean(cut):.0f}", f"{statistics.fmean(seconds):.0f}",
        ])  # fmt: skip
    print(bench.table(["rows", "attention", "right", "loss", "padding", "cut", "seconds"], rows))


def _spread(values: list[float], factor: float, unit: str) -> str:
    scaled = [factor * value for value in values]
    return f"{statistics.fmean(scaled):.4g} ± {statistics.stdev(scaled):.2g}{unit}"


if __name__ == "__main__":
    bench.run(main)
