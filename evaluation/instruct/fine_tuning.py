"""Fine-tuning of a copy of a model on instructions with reference answers, until its validation loss rises.

A micro-batch is one record, so nothing is padded, and a batch is one elastic step
(training/parallel/ordered_reduce.py): the gradient has the same bits on any number of ranks that divides it into powers
of two.
"""

import math
from collections.abc import Iterator
from typing import cast

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from common.errors import BadInput
from evaluation.command_line import FineTuneSettings
from evaluation.loss.held_out_loss import prediction_losses
from evaluation.shared.load import Trained
from evaluation.shared.measuring import share
from evaluation.shared.records import Record
from model.gpt import GPT
from model.loss import NextTokenLoss
from tokens.batches.micro_batches import MicroBatch
from tokens.batches.sampling import Layout, microbatch_index
from training.guard import Guard
from training.optimizer import Optimizer
from training.parallel.process_group import Ranks
from training.parallel.wrap import parallelize
from training.precision import LossScale, Numerics
from training.schedule import Schedule
from training.state import StepSettings, TrainState
from training.step import run_microbatches


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
    prompt = trained.tokenizer.encode(prompt_text(record)).tolist()
    answer = [*trained.tokenizer.encode(record.output).tolist(), trained.tokenizer.end_of_text_id]
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


def answer_losses(network: GPT, example: Example) -> Tensor:
    """Return the loss of each of the answer's tokens, nats, fp32 (A,)."""
    return prediction_losses(network, torch.tensor([example.tokens]))[0, example.first_target - 1 :]


class _Tuner:
    def __init__(self, trained: Trained, examples: list[Example], settings: FineTuneSettings, ranks: Ranks):
        self._examples, self._settings, self._ranks = examples, settings, ranks
        network = trained.network.to(ranks.device)
        rate, records = settings.learning_rate, settings.batch_size
        self._step = StepSettings(
            layout=Layout(
                context_length=network.config.context_length,
                microbatch_size=1,
                microbatches=records,
                data_parallel_size=ranks.data_parallel.size,
            ),
            schedule=Schedule(peak=rate, decay=None, warmup_steps=0, decay_steps=0, total_steps=1, final_fraction=1.0),
            numerics=Numerics(determinism="elastic", precision="fp32", compiled=False),
            seed=settings.seed,
            clipping_max_norm=None,
        )
        self._adamw = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=settings.weight_decay)
        self._state = TrainState(
            parallel=parallelize(NextTokenLoss(network), "ddp", self._step.numerics, records, ranks),
            optimizer=cast("Optimizer", self._adamw),  # decays all parameters, as the book's does
            loss_scale=LossScale("fp32", ranks.device),
            guard=Guard(ranks),
        )

    def run_epoch(self, epoch: int) -> None:
        """Make one update for each whole batch of the records, in an order set by the seed and the epoch."""
        size, network = self._settings.batch_size, self._state.parallel.network
        order = np.random.default_rng([self._settings.seed, epoch]).permutation(len(self._examples))
        steps = len(order) // size
        network.train()
        shown = None if self._ranks.coordinates else True
        for step in tqdm(range(steps), f"  epoch {epoch}", disable=shown, unit="step", leave=False):
            batch = [self._examples[number] for number in order[step * size : (step + 1) * size]]
            micro_batches = self._micro_batches(batch)
            run_microbatches(self._state, self._step, (epoch - 1) * steps + step, micro_batches.__next__)
            self._adamw.step()
            self._state.parallel.zero_grad()
        network.eval()

    def _micro_batches(self, batch: list[Example]) -> Iterator[MicroBatch]:
        """Yield this rank's records of a batch. Their losses add up to the mean over the batch's targets."""
        firsts = [1 if self._settings.prompt_loss else example.first_target for example in batch]
        targets = sum(len(example.tokens) - first for example, first in zip(batch, firsts, strict=True))
        layout = self._step.layout
        for micro_step in range(layout.accumulation):
            index = microbatch_index(layout, micro_step, self._ranks.data_parallel.rank)
            ids = torch.tensor(batch[index].tokens, device=self._ranks.device)[None]
            weights = torch.full(ids[:, 1:].shape, ids.shape[1] - 1.0, device=ids.device)  # against the mean over them
            weights[:, : firsts[index] - 1] = 0.0
            yield MicroBatch(ids[:, :-1], ids[:, 1:], weights, mean_weight=targets)


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
