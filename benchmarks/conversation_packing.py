"""Packing of conversations into rows: cut at row ends or whole, attention across conversations or within each.

    python benchmarks/conversation_packing.py [--seeds 3]   # trains small networks on one core, six minutes

Conversations of examples/toy_dialogue.py differ in length by a factor of five. For each seed a base model learns
stories; from it each packing is fine-tuned on the same conversations, in updates of as many rows. Held-out
questions stand alone in their row, so a greedy answer is right where the argmax at each of its tokens is. Attention
within each conversation is a mask in this file alone. Positions are RoPE's, so a conversation's place in its row is
nothing that the network sees.
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

# T context, B rows of an update, N conversations
CONTEXT, ROWS = 160, 4
STORIES, BASE_STEPS, CONVERSATIONS, EPOCHS = 6_000, 1200, 300, 4
PEAK, FINE_TUNING_PEAK = 4e-3, 1e-3
WIDENED = 5  # factor of the initial weights: with those of a wide network one so narrow learns no attention in minutes
Encoded = tuple[list[int], list[int]]  # ids, weights


class WordTokenizer:
    """Words and marks of the toy world as ids; what Template.encode asks of a tokenizer."""

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

    ids: Tensor  # (R, T + 1), the last one the next row's first
    weights: Tensor  # (R, T + 1), of each id as a target
    owner: Tensor  # (R, T + 1), number of the conversation an id belongs to
    cut: int  # conversations that no row holds whole


def stream(conversations: list[Encoded], end: int) -> Rows:
    """Lay conversations one after another, cut where a row ends."""
    ids, weights, owners = list[int](), list[int](), list[int]()
    for number, (one, counted) in enumerate(conversations):
        ids += [*one, end]
        weights += [*counted, 0]
        owners += [number] * (len(one) + 1)
    rows = -(-(len(ids) - 1) // CONTEXT)
    filler = rows * CONTEXT + 1 - len(ids)
    arrays = ids + [end] * filler, weights + [0] * filler, owners + [-1] * filler
    ends = np.cumsum([len(one) + 1 for one, _ in conversations]) - 1
    cut = sum(first // CONTEXT != last // CONTEXT for first, last in zip([0, *ends[:-1] + 1], ends, strict=True))
    return _windows(arrays, int(cut))


def best_fit(conversations: list[Encoded], end: int) -> Rows:
    """Place each conversation whole, the longest first, in the fullest row that has room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(conversations)), key=lambda each: -len(conversations[each][0])):
        length = len(conversations[number][0]) + 1
        fitting = [row for row, left in enumerate(room) if left >= length]
        place = min(fitting, key=room.__getitem__, default=len(rows))
        if place == len(rows):
            rows.append([])
            room.append(CONTEXT)
        rows[place].append(number)
        room[place] -= length
    ids, weights, owners = list[int](), list[int](), list[int]()
    for row, left in zip(rows, room, strict=True):
        for number in row:
            one, counted = conversations[number]
            ids += [*one, end]
            weights += [*counted, 0]
            owners += [number] * (len(one) + 1)
        ids += [end] * left
        weights += [0] * left
        owners += [-1] * left
    return _windows(([*ids, end], [*weights, 0], [*owners, -1]), 0)


def one_a_row(conversations: list[Encoded], end: int) -> Rows:
    """Give each conversation a row of its own, as it is asked later."""
    filled = []
    for number, (one, counted) in enumerate(conversations):
        rest = CONTEXT + 1 - len(one)
        filled.append((one + [end] * rest, counted + [0] * rest, [number] * len(one) + [-1] * rest))
    ids, weights, owner = (torch.tensor(part) for part in zip(*filled, strict=True))
    return Rows(ids, weights, owner, 0)


PACKINGS = {"stream, cut": stream, "best fit, whole": best_fit, "one a row": one_a_row}


def _windows(arrays: tuple[list[int], list[int], list[int]], cut: int) -> Rows:
    ids, weights, owner = (torch.tensor(each).unfold(0, CONTEXT + 1, CONTEXT) for each in arrays)
    return Rows(ids, weights, owner, cut)


@contextmanager
def within(owner: Tensor | None) -> Iterator[None]:
    """Restrict attention to ids of one conversation, by a mask in place of `is_causal`; None: all before."""
    plain = F.scaled_dot_product_attention
    if owner is not None:
        same = (owner[:, :, None] == owner[:, None]).tril()[:, None]  # (B, 1, T, T)
        F.scaled_dot_product_attention = lambda q, k, v, *_, **__: plain(q, k, v, attn_mask=same)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def losses(network: GPT, rows: Rows, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return logits (B, T, V), and the mean loss over the counted targets, a scalar."""
    with within(rows.owner[:, :-1] if masked else None):
        logits = network(rows.ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1), rows.ids[:, 1:].flatten(), reduction="none")
    weights = rows.weights[:, 1:].flatten().float()
    return logits, (each * weights).sum() / weights.sum()


def train(network: GPT, rows: Rows, recipe: tuple[int, float, int], *, masked: bool) -> None:
    """Make updates of ROWS rows in a drawn order, epoch after epoch; linear warm-up, then linear decay.

    `recipe`: steps, peak learning rate, seed.
    """
    steps, peak, seed = recipe
    optimizer = torch.optim.AdamW(network.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    order = np.random.default_rng(seed)
    count, drawn = len(rows.ids), np.empty(0, np.int64)
    for step in range(steps):
        if len(drawn) < ROWS:
            drawn = np.concatenate([drawn, order.permutation(count)])
        chosen, drawn = torch.from_numpy(drawn[:ROWS]), drawn[ROWS:]
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
        batch = Rows(rows.ids[chosen], rows.weights[chosen], rows.owner[chosen], 0)
        losses(network, batch, masked=masked)[1].backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def measure(network: GPT, questions: Rows) -> tuple[float, float]:
    """Return the share of questions answered right, and the mean loss of the answers' tokens, nats."""
    logits, loss = losses(network, questions, masked=False)
    hits = (logits.argmax(-1) == questions.ids[:, 1:]) | (questions.weights[:, 1:] == 0)
    return hits.all(dim=1).float().mean().item(), loss.item()


def one_seed(seed: int) -> dict[str, list[float]]:
    """Return right, loss, padding share, cut conversations and seconds of each packing by its name."""
    world = ToyWorld(seed)
    stories = [world.story() for _ in range(STORIES)]
    talks = [world.conversation() for _ in range(CONVERSATIONS)]
    asked = world.questions()
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
    questions = one_a_row([encode([Message(USER, one), Message(ASSISTANT, answer)]) for one, answer in asked], end)
    conversations = [encode(talk) for talk in talks]
    found = {}
    for (name, pack), masked in product(PACKINGS.items(), (False, True)):
        if name == "one a row" and masked:
            continue
        rows, network = pack(conversations, end), GPT(config)
        network.load_state_dict(base.state_dict())
        begun, steps = time.process_time(), max(1, EPOCHS * len(rows.ids) // ROWS)
        train(network, rows, (steps, FINE_TUNING_PEAK, seed), masked=masked)
        padding = (rows.owner[:, :-1] == -1).float().mean().item()
        where = "-" if name == "one a row" else "within each" if masked else "across"
        found[f"{name}; {where}"] = [*measure(network, questions), padding, rows.cut, time.process_time() - begun]
    return found


def main(*, seeds: int = 3) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    found = [one_seed(seed) for seed in range(seeds)]
    rows = []
    for name in found[0]:
        right, loss, padding, cut, seconds = (
            [one[name][column] for one in found] for column in range(len(found[0][name]))
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
