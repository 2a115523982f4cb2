"""CORE (Li et al., 2024, arXiv 2406.11794): few-shot tasks, measured as in karpathy/nanochat.

The same pass measures the bits per byte of the gold answers. For small models, this value improves earlier than the
accuracy does.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from tabulate import tabulate
from torch.nn.utils.rnn import pad_sequence

from common.output import show
from common.text import counted
from evaluation.command_line import CoreCommand
from evaluation.core.bundle import CoreTask, check_tasks, read_bundle
from evaluation.core.core_scores import (
    PUBLISHED,
    SOURCE,
    TASKS,
    is_published_data,
    reason_not_comparable,
    sum_of_means,
    task_parts,
    task_score,
)
from evaluation.loss.held_out_loss import byte_lengths
from evaluation.loss.token_losses import BATCH_TOKENS, check_losses
from evaluation.shared.load import Trained
from evaluation.shared.measuring import measure_each, share
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.significance import plus_minus
from model.gpt import output_logits
from model.loss import token_losses
from tokens.search.overlap import GRAM, find_overlap, forms, open_comparable
from training.parallel.process_group import Ranks, from_coordinator

ITEMS_AT_ONCE = 16  # a rank's unit of work: this number of items of similar lengths

HEADS = ["task", "items", "accuracy", "centered", "error", "gold bits/byte"]
COLUMNS = ("items", "accuracy", "centered", "centered_error", "gold_bits_per_byte")


@attrs.frozen
class Choice:
    """One of the texts that a model has to choose from."""

    tokens: np.ndarray  # ids of context and continuation, 1-D
    scored: int  # number of tokens at the end whose losses are computed


def run(command: CoreCommand) -> None:
    check_tasks(command.bundle, command.tasks)
    measure_each(command, "core", partial(_read, command), partial(measure, against=command.against))


def measure(
    trained: Trained, bundle: tuple[list[CoreTask], dict[str, Any]], ranks: Ranks, against: Path | None = None
) -> tuple[dict[str, Any], str]:
    """Return a model's scores, as fields to store and as text. Call this on every rank. Raises BadInput for NaN losses.

    `bundle`: the tasks and their source, as `read_bundle` returns them. `against`: a token directory; if it is given,
    the scores are also computed without the items that share an n-gram with its train split.
    """
    scores, clean, cut = dict[str, dict[str, Any]](), dict[str, dict[str, Any]](), 0
    lengths, (tasks, data) = byte_lengths(trained.tokenizer), bundle
    for task in tasks:
        order = sorted(range(len(task.questions)), key=lambda number: -len(task.prompts(number)[0][0]))
        pieces = [order[at : at + ITEMS_AT_ONCE] for at in range(0, len(order), ITEMS_AT_ONCE)]
        answer_rows = np.concatenate(share(ranks, pieces, partial(answer_questions, trained, task, lengths)))
        hits, bits, is_cut = answer_rows[np.argsort(order)].T
        cut += int(is_cut.sum())
        score = partial(task_score, task.entry.dataset_uri, task.baseline)
        scores[task.entry.label] = score(hits > 0, bits)
        if against is not None:
            is_clean = ~from_coordinator(ranks, partial(trained_on, trained, task, against))
            if is_clean.any():
                clean[task.entry.label] = score(hits[is_clean] > 0, bits[is_clean])
    rows = [[label, *(score[key] for key in COLUMNS)] for label, score in scores.items()]
    text = f"\n{tabulate(rows, HEADS, floatfmt='.4f', intfmt=',')}\n{describe(scores)}"
    text += f"; at most {counted(data['count'], 'item')} per task" if data["count"] else ""
    text += f"; {counted(cut, 'item')} cut to the model's context" if cut else ""
    values = {"data": data, "cut": cut, **means_of(scores), "tasks": scores}
    if against is not None:
        items = {label: score["items"] for label, score in clean.items()}
        values["untouched"] = {"against": str(against), "items": items, **(means_of(clean) if clean else {})}
        text += f"\nonly the {sum(items.values()):,} items that do not share {GRAM} tokens in a row with {against}: "
        text += describe(clean) if clean else "nothing to measure"
    return values, text


def trained_on(trained: Trained, task: CoreTask, against: Path) -> np.ndarray:
    """Return whether each item shares an n-gram with a train split, bool (items,).

    Raises BadInput if the split has the ids of another tokenizer.
    """
    texts = [task.entry.continuation_delimiter.join(question.pairs[question.gold]) for question in task.questions]
    stream = open_comparable(against, "train", trained.tokenizer)
    return find_overlap([stream], [forms(trained.tokenizer, text) for text in texts]).touched


def means_of(scores: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Return the means over tasks, with their standard errors, as fields of the stored result."""
    (core, core_error, _), (gold, gold_error, _) = map(sum_of_means, task_parts(scores))
    errors = {"core_error": core_error, "gold_bits_per_byte_error": gold_error}
    return {"core": core, "gold_bits_per_byte": gold, **errors}


def describe(scores: dict[str, dict[str, Any]]) -> str:
    """Return the means over tasks as text."""
    means = means_of(scores)
    name = "CORE" if len(scores) == TASKS else f"centered, mean of {counted(len(scores), 'task')}:"
    core, gold = (plus_minus(means[key] or 0.0, means[f"{key}_error"], 4) for key in ("core", "gold_bits_per_byte"))
    return f"{name} {core}; gold answers {gold} bits per byte"


def answer_questions(
    trained: Trained, task: CoreTask, lengths: np.ndarray, numbers: list[int]
) -> list[tuple[bool, float, bool]]:
    """Answer questions of a task, and return three values for each question.

    The values are whether the model's answer is correct, the bits per byte of the gold answer, and whether a prompt was
    cut because it was too long for the context. `lengths`: number of bytes of each token (V,). `numbers`: the questions
    to answer. Raises BadInput for a loss that is not finite.
    """
    context_length, rows = trained.network.config.context_length, []
    questions = [choices_of(trained, task, lengths, number) for number in numbers]
    # The first token of a prompt has no loss, so the number of scored tokens must be less than the context length.
    cut = [
        [Choice(choice.tokens[-context_length:], min(choice.scored, context_length - 1)) for choice in choices]
        for choices, _, _ in questions
    ]
    all_losses = choice_losses(trained, cut)
    for number, (choices, compared, gold_size), losses in zip(numbers, questions, all_losses, strict=True):
        gold = task.questions[number].gold
        nats, likeliest = (values[-gold_size:] for values in losses[gold])
        bits = float(nats.sum()) / math.log(2) / int(lengths[choices[gold].tokens[-len(nats) :]].sum())
        # If a choice is a prefix of the others, it has no tokens to compare, and its mean is NaN. As in nanochat, `min`
        # selects such a choice only if it comes first. Among choices with equal means, `min` selects the first one.
        ends = [
            choice_nats[-count:] if count else choice_nats[:0]
            for (choice_nats, _), count in zip(losses, compared, strict=True)
        ]
        means = [float(end.mean()) if len(end) else math.nan for end in ends]
        best = min(range(len(means)), key=means.__getitem__)
        is_correct = bool(likeliest.all()) if task.entry.icl_task_type == "language_modeling" else best == gold
        rows.append((is_correct, bits, any(len(choice.tokens) > context_length for choice in choices)))
    return rows


def choices_of(
    trained: Trained, task: CoreTask, lengths: np.ndarray, number: int
) -> tuple[list[Choice], list[int], int]:
    """Return a question's choices, the number of compared tokens in each, and the size of the gold answer.

    As in nanochat, choices that share a context are compared on the tokens after their common prefix, and choices that
    share a continuation are compared on their common suffix. The gold answer is the complete continuation with the
    white space before it. Its size is the number of tokens, counted from the end, that are needed to cover it.
    """
    prompts, gold = task.prompts(number), task.questions[number].gold
    rows = [[trained.begin_id, *trained.tokenizer.encode("".join(prompt)).tolist()] for prompt in prompts]
    answer = "".join(prompts[gold])[len(prompts[gold][0].rstrip()) :]
    gold_size = 1 + int(np.searchsorted(lengths[rows[gold][::-1]].cumsum(), len(answer.encode())))
    compared = [len(row) - _common(rows) for row in rows]
    if task.entry.icl_task_type == "schema":
        compared = [_common([row[::-1] for row in rows])] * len(rows)
    scored = [min(max(count, gold_size), len(row) - 1) for row, count in zip(rows, compared, strict=True)]
    return [Choice(np.array(row), count) for row, count in zip(rows, scored, strict=True)], compared, gold_size


@torch.inference_mode()
def choice_losses(trained: Trained, items: Sequence[Sequence[Choice]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return two arrays for each choice of each item, with an entry for each scored token.

    The first array has the losses, in nats, fp64. The second array is True where the scored token was the model's
    likeliest token. Logits are computed only for the scored tokens. Raises BadInput for a loss that is not finite.
    """
    network, choices, arrays = trained.network, [*chain(*items)], dict[int, tuple[np.ndarray, np.ndarray]]()
    order = sorted(range(len(choices)), key=lambda number: -len(choices[number].tokens))
    batches = -(-len(choices) * len(choices[order[0]].tokens) // BATCH_TOKENS)
    for batch in np.array_split(order, min(batches, len(order))):
        rows = [torch.from_numpy(choices[number].tokens.astype(np.int64)) for number in batch]
        counts = [choices[number].scored for number in batch]
        tokens = pad_sequence(rows, batch_first=True).to(next(network.parameters()).device)  # padding has no effect
        spans = [(row, len(rows[row]) - count, len(rows[row])) for row, count in enumerate(counts)]
        targets = torch.cat([tokens[row, begin:end] for row, begin, end in spans])  # (N,)
        hidden: Any = network.hidden(tokens[:, :-1])  # (B, T, C)
        hidden = torch.cat([hidden[row, begin - 1 : end - 1] for row, begin, end in spans])  # (N, C)
        logits = output_logits(hidden, network.output_weight(), network.head_options)  # (N, V)
        nats = token_losses(logits, targets).double().cpu()
        check_losses(trained, nats)
        parts = zip(nats.split(counts), (logits.argmax(-1) == targets).cpu().split(counts), strict=True)
        arrays |= {
            int(number): (losses.numpy(), best.numpy()) for number, (losses, best) in zip(batch, parts, strict=True)
        }
    numbers = iter(range(len(choices)))
    return [[arrays[next(numbers)] for _ in item] for item in items]


def _common(rows: list[list[int]]) -> int:
    """Return the length of the longest common prefix."""
    columns = enumerate(zip(*rows, strict=False))
    return next((position for position, ids in columns if len(set(ids)) > 1), min(map(len, rows)))


def _read(command: CoreCommand, _: list[ModelLocation]) -> tuple[list[CoreTask], dict[str, Any]]:
    """Read the bundle, print the number of its items, and print the published scores if they are comparable."""
    tasks, data = read_bundle(command.bundle, command.tasks, command.count)
    show(f"{data['file']}: {sum(len(task.questions) for task in tasks):,} items of {len(tasks)} tasks")
    labels = [task.entry.label for task in tasks]
    if is_published_data(data, labels):
        show(f"CORE by {SOURCE}: {', '.join(f'{model} {value}' for model, value in PUBLISHED.items())}")
    else:
        show(f"Published CORE scores are not comparable, because {reason_not_comparable(data, labels)}")
    return tasks, data
