"""Fine-tune on instructions with reference answers, in a training run that ends when its validation loss rises.

The token files in the run directory contain the records as conversations in Alpaca's template (Taori et al. 2023).
Training records are packed into rows of the model's context length; each validation record has a separate row. A
micro-batch is one row, and the run uses elastic determinism, so the weights have the same bits on any number of GPUs.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from common.errors import EXIT_DONE, BadInput
from common.files import replace_file
from common.output import show
from evaluation.command_line import FineTuneSettings
from evaluation.loss.token_losses import prediction_losses
from evaluation.shared.load import Trained
from evaluation.shared.records import Record
from model.gpt import GPT
from tokens.documents.conversations import conversation
from tokens.format.header import read_header, write_weighted
from tokens.format.manifest import MANIFEST, RANKS_FILE, FileEntry, Manifest, SourceRecord, manifest_text, read_content
from tokens.prepare.packing import pack
from tokens.tokenizer.loading import record_of
from tokens.tokenizer.ranks import ranks_text
from tokens.tokenizer.template import TEMPLATES, Message
from tokens.tokenizer.tokenizer import Tokenizer, token_dtype
from training.supervision.torchrun import MOST_RANKS
from training.supervision.training_process import JOB_LOG, TrainingProcess
from training.telemetry.metrics_log import Metric, read_metrics

ROOT = Path(__file__).parents[2]
ALPACA = TEMPLATES["alpaca"]
TOKENS = "tokens"  # directory of the token files in the run directory
TRAIN: dict[str, Any] = {  # keys of train.json whose values do not depend on the records or the settings
    "objective": "answers",
    "shuffle": True,
    "microbatch_size": 1,
    "keep_checkpoints": 1,
    "patience": 1,
    "precision": "fp32",
    "determinism": "elastic",
    "compile": False,
    "require_stock_class": False,
}
POLL_SECONDS = 0.1  # interval at which a training run is checked


@attrs.frozen
class Example:
    """The tokens of a record: its prompt, its reference answer, and the end of text."""

    tokens: list[int]
    first_target: int  # index of the answer's first token
    cut: bool  # True: the context is too short for the complete record


@attrs.frozen(kw_only=True)
class FineTuned:
    """The outcome of a fine-tuning run."""

    # Validation losses before the first epoch and after each epoch, in nats per token of the answers
    losses: list[float]
    best_epoch: int  # 0: no epoch improved the loss


def messages(record: Record) -> list[Message]:
    """Return the two messages of a record: the question, including the input, and the reference answer."""
    return conversation(attrs.asdict(record), special_tokens=()).messages


def prompt_ids(trained: Trained, record: Record) -> list[int]:
    """Return the ids of the prompt that asks a record's question. In training, the answer follows these ids."""
    return ALPACA.prompt(trained.tokenizer, messages(record)[:1])


def make_example(trained: Trained, record: Record, *, targets: bool = True) -> Example:
    """Return the tokens of a record, cut to the model's context.

    If the record is too long, the beginning of the prompt is removed first, then the end of the answer. `targets`:
    allow one token more than the context length, because the last token is only a target.
    """
    room = trained.network.config.context_length + targets
    ids, _ = ALPACA.encode(trained.tokenizer, messages(record))
    prompt = prompt_ids(trained, record)
    answer = ids[len(prompt) :]
    prompt_end = prompt[-max(room - len(answer), room // 2) :]
    return Example((prompt_end + answer)[:room], len(prompt_end), len(ids) > room)


def answer_losses(network: GPT, example: Example) -> Tensor:
    """Return the loss of each token of the answer, nats, fp32 (A,)."""
    return prediction_losses(network, torch.tensor([example.tokens]))[0, example.first_target - 1 :]


def write_run(
    trained: Trained, train: list[Record], validation: list[Record], settings: FineTuneSettings, run: Path
) -> None:
    """Write the directory of a fine-tuning run. Raises BadInput if there are too few records for an update."""
    if len(train) < settings.batch_size:
        raise BadInput(
            f"--batch-size {settings.batch_size}: there are only {len(train)} training records; pass a smaller number"
        )
    context = trained.network.config.context_length
    examples = [make_example(trained, record, targets=False) for record in train]
    held_out = [make_example(trained, record, targets=False) for record in validation]
    rows = pack([len(example.tokens) for example in examples], context)
    (run / TOKENS).mkdir(parents=True, exist_ok=True)
    files = run / TOKENS / "train.safetensors", run / TOKENS / "validation.safetensors"
    _write_rows(files[0], trained, [[examples[index] for index in row] for row in rows], settings)
    _write_rows(files[1], trained, [[example] for example in held_out], attrs.evolve(settings, prompt_loss=False))
    _write_manifest(run / TOKENS, trained.tokenizer, files, len(examples) + len(held_out))
    batch = max(1, round(settings.batch_size * len(rows) / len(examples)))
    steps = len(rows) // batch  # per epoch
    values = TRAIN | {
        "dataset": str((run / TOKENS).absolute()),
        "min_train_tokens": settings.epochs * steps * batch * context,
        "max_epochs": settings.epochs,
        "global_batch_size": batch,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "checkpoint_interval": steps,
        "validation_interval": steps,
        "validation_sequences": len(held_out),
        "random_seed": settings.seed,
    }
    for name, content in (("model", attrs.asdict(trained.network.config)), ("train", values)):
        replace_file(run / f"{name}.json", json.dumps(content, indent=4) + "\n")


def train_run(run: Path, origin: Path, device: torch.device) -> FineTuned:
    """Train or resume a run that starts from a model's weights, and return its losses. Raises BadInput if it fails."""
    batch = json.loads((run / "train.json").read_text())["global_batch_size"]
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    launcher = ["-m", "training.supervision.torchrun"] if 1 < min(gpus, MOST_RANKS) <= batch else []
    options = ["--init-from", str(origin.absolute()), "--device", device.type]
    command = [*launcher, str(ROOT / "train.py"), str(run.absolute()), *options]
    process = TrainingProcess(run, command, {"PYTHONPATH": os.pathsep.join([str(ROOT), os.getenv("PYTHONPATH", "")])})
    next_epoch = 1
    try:
        while (end := process.end()) is None:
            next_epoch = _print_losses(run, next_epoch)
            time.sleep(POLL_SECONDS)
    finally:  # for example, after Ctrl-C
        process.ask_to_stop()
        while process.end() is None:
            time.sleep(POLL_SECONDS)
    _print_losses(run, next_epoch)
    if end.status != EXIT_DONE:
        raise BadInput(f"{end.problem} ({run / JOB_LOG})")
    losses = _losses(run)
    return FineTuned(losses=losses, best_epoch=losses.index(min(losses)))


def _write_rows(path: Path, trained: Trained, rows: Sequence[list[Example]], settings: FineTuneSettings) -> None:
    """Write a token file with a weight for each token: 1 for the targets of training, otherwise 0."""
    context, padding = trained.network.config.context_length, trained.tokenizer.end_of_text_id
    tokens = np.full(len(rows) * context + 1, padding, token_dtype(trained.tokenizer.vocabulary_size))
    weights = np.zeros(len(tokens), np.uint8)
    for number, row in enumerate(rows):
        start = number * context
        for example in row:
            first, end = (1 if settings.prompt_loss else example.first_target), start + len(example.tokens)
            tokens[start:end] = example.tokens
            weights[start + first : end] = 1
            start = end
    write_weighted(path, tokens, weights, context)


def _write_manifest(directory: Path, tokenizer: Tokenizer, files: Sequence[Path], documents: int) -> None:
    """Write the manifest of token files. `documents`: the number of records in them."""
    if tokenizer.has_ranks_file:
        replace_file(directory / RANKS_FILE, ranks_text(tokenizer.coder.ranks))
    token_files = [read_header(path) for path in files]
    entries = {
        file.path.name: FileEntry(**attrs.asdict(read_content(file)), tokens=file.length, dtype=file.dtype.name)
        for file in token_files
    }
    record = record_of(tokenizer, ranks=tokenizer.has_ranks_file, template=ALPACA.text)
    tokens = sum(file.length for file in token_files)
    sources = [SourceRecord(name="instruct", files=1, bytes=0)]
    manifest = Manifest(files=entries, documents=documents, tokens=tokens, tokenizer=record, sources=sources)
    replace_file(directory / MANIFEST, manifest_text(manifest))


def _losses(run: Path) -> list[float]:
    """Return the validation losses that a run has recorded. The first one was measured before the first step."""
    validations = [record for record in read_metrics(run) if Metric.VALIDATION_LOSS in record]
    return [*{record["step"]: record[Metric.VALIDATION_LOSS] for record in validations}.values()]


def _print_losses(run: Path, first: int) -> int:
    """Print the new validation losses, from epoch `first` on. Return the value of `first` for the next call."""
    losses = _losses(run)
    for epoch in range(first, len(losses)):
        show(f"  epoch {epoch}: validation loss {losses[epoch - 1]:.4f} -> {losses[epoch]:.4f}")
    return max(first, len(losses))
