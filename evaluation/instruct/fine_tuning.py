"""Fine-tuning of a copy of a model on instructions with reference answers, until its validation loss rises.

A micro-batch is one record, so nothing is padded, and a batch is one elastic step
(training/parallel/ordered_reduce.py): the gradient has the same bits on any number of ranks that divides it into powers
of two.
"""

import math

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from common.errors import BadInput
from evaluation.instruct.command import FineTuneSettings
from evaluation.shared.load import Trained
from evaluation.shared.measuring import share
from evaluation.shared.records import Record
from tokens.batches.rank_shares import rank_shares
from training.parallel.process_group import Ranks
from training.parallel.wrap import parallelize
from training.precision import Numerics
from training.step import seed_dropout


@attrs.frozen
class Example:
    """A record as tokens: the prompt, the reference answer, the end of text."""

    tokens: list[int]  # at most context + 1
    first_target: int  # index of the answer's first token
    cut: bool  # the context is too short for all of it


@attrs.frozen(kw_only=True)
class FineTuned:
    """Outcome of a fine-tuning, after which the network has the weights of the best epoch."""

    losses: list[float]  # validation loss after each epoch, nats per token of the answers; the first is before any
    best_epoch: int  # 0: no epoch improved the loss


def prompt_text(record: Record) -> str:
    """Return the prompt of a record in the form of Stanford's Alpaca (Taori et al. 2023), as gpjt's comparisons use."""
    text = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{record.instruction}"
    )
    return text + (f"\n\n### Input:\n{record.input}" if record.input else "") + "\n\n### Response:\n"


def make_example(trained: Trained, record: Record) -> Example:
    """Return a record as tokens. To fit the context, the prompt is cut at its start, then the answer at its end."""
    room = trained.network.config.context_length + 1
    prompt = encode(trained, prompt_text(record))
    answer = [*encode(trained, record.output), trained.tokenizer.end_of_text_id]
    kept = prompt[-max(room - len(answer), room // 2) :]
    tokens = (kept + answer)[:room]
    return Example(tokens, len(kept), len(prompt) + len(answer) > room)


def fine_tune(
    trained: Trained, train: list[Record], validation: list[Record], settings: FineTuneSettings, ranks: Ranks
) -> FineTuned:
    """Train the network on the records until validation loss rises; call it on every rank.

    Raises BadInput where the batch cannot be shared by so many ranks, and where a loss is not finite.
    """
    if ranks.data_parallel.size > settings.batch_size:
        got = f"got {ranks.data_parallel.size} ranks, wanted at most that many"
        raise BadInput(f"--batch-size {settings.batch_size}: {got}")
    if len(train) < settings.batch_size:
        raise BadInput(f"--batch-size {settings.batch_size}: got {len(train)} training records; pass a smaller one")
    network = trained.network
    held_out = [make_example(trained, record) for record in validation]
    losses = [validation_loss(trained, held_out, ranks)]
    best_epoch, best = 0, _copy(network)
    tuner = _Tuner(trained, [make_example(trained, record) for record in train], settings, ranks)
    for epoch in range(1, settings.epochs + 1):
        tuner.run_epoch(epoch)
        losses.append(validation_loss(trained, held_out, ranks))
        if ranks.coordinates:
            tqdm.write(f"  epoch {epoch}: validation loss {losses[-2]:.4f} -> {losses[-1]:.4f}")
        if losses[-1] >= losses[best_epoch]:
            break
        best_epoch, best = epoch, _copy(network)
    network.load_state_dict(best)
    network.eval()
    return FineTuned(losses=losses, best_epoch=best_epoch)


def validation_loss(trained: Trained, examples: list[Example], ranks: Ranks) -> float:
    """Return the mean loss of all tokens of all answers, nats; ranks share the examples.

    Raises BadInput where it is not finite.
    """
    sums = share(ranks, examples, lambda example: float(answer_losses(trained.network, example).sum()), "record")
    loss = math.fsum(sums) / sum(len(example.tokens) - example.first_target for example in examples)
    if not math.isfinite(loss):
        raise BadInput(
            f"{trained.place.path}: its loss is not finite: the weights are damaged, or --learning-rate is too high"
        )
    return loss


@torch.no_grad()
def answer_losses(network: nn.Module, example: Example) -> Tensor:
    """Return the loss of each of the answer's tokens, nats, fp32 (A,)."""
    return _losses(network, example.tokens, example.first_target)


def encode(trained: Trained, text: str) -> list[int]:
    """Return the ids of a text."""
    return [int(token) for token in trained.tokenizer.encode(text)]


class _Tuner:
    def __init__(self, trained: Trained, examples: list[Example], settings: FineTuneSettings, ranks: Ranks):
        self._network, self._examples, self._settings, self._ranks = trained.network, examples, settings, ranks
        part = ranks.data_parallel
        self._share = rank_shares(settings.batch_size, part.size)[part.rank]  # records; a micro-batch is one
        numerics = Numerics(determinism="elastic", precision="fp32", compiled=False)
        network = trained.network.to(ranks.device)
        self._parallel = parallelize(network, "ddp", numerics, settings.batch_size, ranks)
        self._optimizer = torch.optim.AdamW(
            trained.network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    def run_epoch(self, epoch: int) -> None:
        """Make one update for each whole batch of the records, in an order set by the seed and the epoch."""
        size = self._settings.batch_size
        order = np.random.default_rng([self._settings.seed, epoch]).permutation(len(self._examples))
        steps = len(order) // size
        self._network.train()
        shown = None if self._ranks.coordinates else True
        for step in tqdm(range(steps), f"  epoch {epoch}", disable=shown, unit="step", leave=False):
            batch = [self._examples[number] for number in order[step * size : (step + 1) * size]]
            self._update((epoch - 1) * steps + step, batch)
        self._network.eval()

    def _update(self, step: int, batch: list[Example]) -> None:
        firsts = [1 if self._settings.prompt_loss else example.first_target for example in batch]
        targets = sum(len(example.tokens) - first for example, first in zip(batch, firsts, strict=True))
        for index in self._share:
            if self._network.config.drop_rate > 0:
                seed_dropout(self._settings.seed, step, index)
            with self._parallel.gradient_sync(enabled=index == self._share[-1]):
                losses = _losses(self._parallel.model, batch[index].tokens, firsts[index])
                (losses.sum() / targets).backward()  # reduced by sums: the mean over the batch's tokens
        self._optimizer.step()
        self._parallel.zero_grad()


def _losses(model: nn.Module, tokens: list[int], first: int) -> Tensor:
    """Return the loss of each token from `first` on, nats, fp32, 1-D."""
    ids = torch.tensor(tokens, device=next(model.parameters()).device)
    logits = model(ids[None, :-1])[0, first - 1 :]  # (A, V)
    return F.cross_entropy(logits.float(), ids[first:], reduction="none")


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
